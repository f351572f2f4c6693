/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The host that a program runs on, as user space keeps it.
 */
#ifndef SEGUE_NET_HOST_H
#define SEGUE_NET_HOST_H

#include "parse.h"

/* The interface's MAC address, in memory order. */
volatile __u64 host_mac;

/* The interface's index, if it can send what it received by XDP_TX; else 0. */
volatile __u32 host_hairpin;

/* Whether the interface leads out of the segment routing domain. Set at load, so that the
 * verifier leaves out what does not apply. */
const volatile bool host_is_outside;

/* Whether it is this host's MAC address that stands here: the two bytes behind it are read
 * as well. */
static __always_inline bool is_host(const void *address)
{
	return (*(const __u64 *)address ^ host_mac) << 16 == 0;
}

/* Whether a frame is for this host: other MAC addresses, multicast and broadcast are for
 * others too. */
static __always_inline bool for_host(const struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);

	return (void *)(ethernet + 1) <= frame_end(ctx) && is_host(ethernet->h_dest);
}

#endif
