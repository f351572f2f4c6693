/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The GRE header (RFC 2784, RFC 7676) as balancers write it: without a checksum (RFC 2784), and
 * without a key or a sequence number (RFC 2890).
 */
#ifndef SEGUE_NET_GRE_H
#define SEGUE_NET_GRE_H

#include "types.h"

struct gre_header {
	__be16 flags; /* no checksum, key or sequence; version 0 */
	__be16 protocol;
};

#endif
