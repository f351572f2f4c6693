/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The host that a program runs on. User space keeps these variables up to date.
 */
#ifndef SEGUE_NET_HOST_H
#define SEGUE_NET_HOST_H

#include "parse.h"

/* The interface's MAC address, in memory order. */
volatile __u64 host_mac;

/* The interface's index, if packets to servers may leave by XDP_TX; 0: they are redirected. */
volatile __u32 host_hairpin;

/* Whether the interface leads out of the segment routing domain. Set at load, so that the
 * verifier removes code that does not apply. */
const volatile bool host_is_outside;

/* Whether `address` is this host's MAC address. Reads eight bytes, two more than an address has. */
static __always_inline bool is_host(const void *address)
{
	return (*(const __u64 *)address ^ host_mac) << 16 == 0;
}

/* Whether a frame is for this host alone: neither for another MAC address nor multicast or
 * broadcast. */
static __always_inline bool for_host(const struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);

	return (void *)(ethernet + 1) <= frame_end(ctx) && is_host(ethernet->h_dest);
}

#endif
