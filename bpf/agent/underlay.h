/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The agent's side of the underlay (net/underlay.h): XDP removes it from received frames first, and
 * adds it last to frames that leave the server again.
 */
#ifndef SEGUE_AGENT_UNDERLAY_H
#define SEGUE_AGENT_UNDERLAY_H

#include "envelope.h"
#include "net/host.h"
#include "net/underlay.h"
#include "stats.h"

/* The headers of a frame to this host's port of the underlay; NULL: it is another frame. */
static __always_inline const struct underlay_header *underlay_of(struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);
	const struct underlay_header *outer = (void *)(ethernet + 1);

	if ((void *)(outer + 1) > frame_end(ctx) || !is_host(ethernet) ||
	    ethernet->h_proto != bpf_htons(ETH_P_IP) || outer->ip.protocol != IPPROTO_UDP ||
	    outer->udp.dest != underlay_port || outer->ip.daddr != underlay_address(node_locator))
		return NULL;
	return outer;
}

/* Removes the underlay from a frame, and stores its source port. Other frames stay as they are. The
 * reason is none, unless the frame is dropped. */
static __always_inline enum agent_reason take_underlaid(struct xdp_md *ctx, __be16 *source_port)
{
	const struct underlay_header *outer = underlay_of(ctx);

	if (!outer)
		return AGENT_NONE;
	*source_port = outer->udp.source;
	switch (remove_underlay(ctx, node_locator)) {
	case UNDERLAY_REMOVED:
		return AGENT_NONE;
	case UNDERLAY_STRANGER:
		return AGENT_DROP_STRANGER;
	case UNDERLAY_WRONG:
		return AGENT_DROP_UNDERLAY;
	default:
		return AGENT_DROP_REWRITE;
	}
}

/* Whether a packet to a SID came without the underlay, or in an encapsulation that the underlay
 * does not carry. The packets that trace asks about come without. */
static __always_inline bool lacks_underlay(const struct envelope *envelope, __be16 source_port)
{
	if (is_tunneled(envelope))
		return false;
	return (!source_port && !dry_run) || envelope->encapsulation != ENCAP_SRV6_ENCAP;
}

/* Whether a frame with this reason leaves the server again. */
static __always_inline bool leaves_again(enum agent_reason why)
{
	return why >= AGENT_NEXT_SEGMENT && why <= AGENT_ANSWER_PROBE;
}

/* Adds the underlay to a frame that leaves the server again, with the source port by which it came,
 * and marks it for tc_forward. False: it failed. */
static __always_inline bool add_underlay(struct xdp_md *ctx, __be16 source_port)
{
	struct underlay_header *outer;
	struct ethhdr *ethernet;
	struct ipv6hdr *ip;

	if (bpf_xdp_adjust_head(ctx, -(int)UNDERLAY_SIZE))
		return false;
	ethernet = frame_start(ctx);
	outer = (void *)(ethernet + 1);
	ip = (void *)(outer + 1);
	if ((void *)(ip + 1) > frame_end(ctx))
		return false;
	write_underlay(outer, node_locator, *(const __u64 *)&ip->daddr, ipv6_traffic_class(ip),
		       sizeof(*ip) + bpf_ntohs(ip->payload_len), source_port);
	mark_own(ethernet);
	*ethertype_of(ethernet) = bpf_htons(ETH_P_IP);
	return true;
}

/* Whether xdp_agent has left a packet in the underlay to tc_forward. */
static __always_inline bool left_in_underlay(const struct __sk_buff *skb)
{
	struct underlay_header outer;

	return skb->protocol == bpf_htons(ETH_P_IP) && is_marked_own(skb) &&
	       !bpf_skb_load_bytes(skb, ETH_HLEN, &outer, sizeof(outer)) &&
	       outer.ip.protocol == IPPROTO_UDP && outer.udp.dest == underlay_port &&
	       outer.ip.saddr == underlay_address(node_locator);
}

#endif
