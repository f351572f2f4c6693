/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The host that a program runs on. User space keeps these variables up to date.
 */
#ifndef SEGUE_NET_HOST_H
#define SEGUE_NET_HOST_H

#include "parse.h"

/* The interface's MAC address, in memory order. */
volatile __u64 host_mac;

/* The interface's index, if packets that leave by the same interface may be sent by XDP_TX; 0: all
 * packets are redirected. */
volatile __u32 host_hairpin;

/* Whether the interface leads out of the segment routing domain. Set at load, so that the
 * verifier removes code that does not apply. */
const volatile bool host_is_outside;

/* Whether `address` is this host's MAC address. It reads eight bytes, and shifts out the two behind
 * the address. */
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

/* Marks a frame for a tc program behind XDP: writes this host's MAC address as its source and as
 * its destination. No received frame has both. */
static __always_inline void mark_own(struct ethhdr *ethernet)
{
	__u64 mac = host_mac;

	__builtin_memcpy(ethernet->h_dest, &mac, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, &mac, ETH_ALEN);
}

/* Whether XDP has marked the frame (mark_own). XDP marks no frame with a VLAN tag. The kernel
 * removes a tag between XDP and tc, so a frame that had one must not count. */
static __always_inline bool is_marked_own(const struct __sk_buff *skb)
{
	__u64 destination, source;

	return !skb->vlan_present &&
	       !bpf_skb_load_bytes(skb, 0, &destination, sizeof(destination)) &&
	       !bpf_skb_load_bytes(skb, ETH_ALEN, &source, sizeof(source)) &&
	       is_host(&destination) && is_host(&source);
}

#endif
