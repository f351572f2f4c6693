/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The host that a program runs on, as user space keeps it.
 */
#ifndef SEGUE_HOST_H
#define SEGUE_HOST_H

#include "parse.h"

/* The interface's MAC address, in memory order. */
volatile __u64 host_mac;

/* Whether the frame is for this host: other MAC addresses, multicast and
 * broadcast are for others too. */
static __always_inline bool for_host(const struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);
	__u64 mac = 0;

	if ((void *)(ethernet + 1) > frame_end(ctx))
		return false;
	__builtin_memcpy(&mac, ethernet->h_dest, ETH_ALEN);
	return mac == host_mac;
}

#endif
