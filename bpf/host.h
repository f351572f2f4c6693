/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The host that a program runs on, as user space keeps it.
 */
#ifndef SEGUE_HOST_H
#define SEGUE_HOST_H

#include "parse.h"

/* The interface's MAC address, in memory order. */
volatile __u64 host_mac;

/* The interface's index, if it can send what it received by XDP_TX; else 0. */
volatile __u32 host_hairpin;

/* Whether the interface leads out of the segment routing domain. Set at load, so that the
 * verifier leaves out what does not apply. */
const volatile bool host_is_outside;

/* Whether a frame's destination is this host: other MAC addresses, multicast and
 * broadcast are for others too. */
static __always_inline bool is_host(const __u8 destination[ETH_ALEN])
{
	__u64 mac = *(const __u32 *)destination | (__u64) * (const __u16 *)&destination[4] << 32;

	return mac == host_mac;
}

static __always_inline bool for_host(const struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);

	return (void *)(ethernet + 1) <= frame_end(ctx) && is_host(ethernet->h_dest);
}

#endif
