/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Passes a packet on to another server of its list (RFC 8754 section 4.3.1.1).
 *
 * XDP rewrites the packet and marks the frame. The packet leaves from tc ingress, right behind XDP.
 * There the kernel finds the next hop, as for its own packets: it resolves the neighbour and holds
 * the packet meanwhile. XDP would need bpf_fib_lookup, which finds only resolved neighbours and
 * requires a forwarding interface. Forwarding can harm a server: if it is enabled, even on lo
 * alone, the kernel deletes the default routes from router advertisements.
 */
#ifndef SEGUE_AGENT_NEXT_SEGMENT_H
#define SEGUE_AGENT_NEXT_SEGMENT_H

#include <linux/pkt_cls.h>

#include "decision.h"
#include "envelope.h"
#include "net/load.h"
#include "net/host.h"

/* Makes a segment of the list the destination, sets the segments left, and takes one hop. */
static __always_inline bool go_to_segment(struct xdp_md *ctx, const struct envelope *envelope,
					  const struct in6_addr *segment, __u8 segments_left)
{
	struct ethhdr *ethernet = frame_start(ctx);
	struct ipv6hdr *ip = (void *)(ethernet + 1);
	/* The mask is for the verifier: options are shorter. */
	struct segment_routing_header *srh = frame_start(ctx) + (srh_offset(envelope) & 0xfff);

	if ((void *)(ip + 1) > frame_end(ctx) || (void *)(srh + 1) > frame_end(ctx))
		return false;
	srh->segments_left = segments_left;
	ip->hop_limit--;
	copy_address(&ip->daddr, segment);
	mark_own(ethernet);
	return true;
}

/*
 * Rewrites the packet for another server, and leaves it to tc_forward. The other server is the next
 * one of the list. With AGENT_NEXT_RETURNED it is an earlier candidate, which this server's own
 * entry now names (least.h). Then the segments left stay the same.
 */
static __always_inline enum agent_reason
pass_on(struct xdp_md *ctx, const struct envelope *envelope, enum agent_reason decision)
{
	__u8 segments_left = envelope->segments_left - (decision != AGENT_NEXT_RETURNED);
	struct in6_addr next;

	if (!load_entry(ctx, envelope, segments_left, &next) || !is_other_server(&next))
		return AGENT_DROP_NEXT_SEGMENT;
	if (envelope->hop_limit <= 1)
		return AGENT_DROP_HOP_LIMIT;
	if (dry_run)
		record.next = next;
	if (!go_to_segment(ctx, envelope, &next, segments_left))
		return AGENT_DROP_REWRITE;
	return decision;
}

/*
 * Whether the balancer wants a packet back if this server does not have its flow. The headers must
 * already have the form of a signal's (docs/understand/protocol.md, "Returned packets").
 */
static __always_inline bool wants_return(const struct envelope *envelope)
{
	if (function_of(envelope) != SID_STEER || envelope->options ||
	    !(bpf_be64_to_cpu(envelope->sid_low) & LOAD_RETURN))
		return false;
	if (envelope->encapsulation == ENCAP_SRV6_ENCAP)
		return !envelope->srh;
	return envelope->srh == srh_size(3) && envelope->last_entry == 2 &&
	       envelope->segments_left == 1;
}

/* Writes the addresses of a returned packet: from this node to the balancer that sent it. */
static __always_inline bool readdress(struct xdp_md *ctx, const struct envelope *envelope,
				      const struct in6_addr *balancer, const struct in6_addr *node)
{
	struct ethhdr *ethernet = frame_start(ctx);
	struct ipv6hdr *ip = (void *)(ethernet + 1);
	struct segment_routing_header *srh = (void *)(ip + 1);

	if ((void *)(ip + 1) > frame_end(ctx))
		return false;
	if (envelope->encapsulation == ENCAP_SRV6_INSERT) {
		if ((void *)srh + srh_size(3) > frame_end(ctx))
			return false;
		copy_address(&srh->segment[1], balancer);
		copy_address(&srh->segment[2], node);
	} else {
		copy_address(&ip->saddr, node);
	}
	copy_address(&ip->daddr, balancer);
	ip->hop_limit--;
	mark_own(ethernet);
	return true;
}

/* Returns a packet to the balancer, and leaves it to tc_forward. */
static __always_inline enum agent_reason return_packet(struct xdp_md *ctx,
						       const struct envelope *envelope)
{
	struct in6_addr balancer = {}, node = {};

	((__u64 *)&balancer)[0] = envelope->sender;
	((__u64 *)&balancer)[1] = SID_LOW(SID_RETURN);
	((__u64 *)&node)[0] = node_locator;
	if (envelope->hop_limit <= 1)
		return AGENT_DROP_HOP_LIMIT;
	if (dry_run)
		record.next = balancer;
	return readdress(ctx, envelope, &balancer, &node) ? AGENT_RETURN_NOT_LOCAL
							  : AGENT_DROP_REWRITE;
}

/* Reads the IPv6 header of a packet that XDP has seen. False for packets that XDP does not handle:
 * those that are not IPv6, and those with a VLAN tag. */
static __always_inline bool read_behind_xdp(const struct __sk_buff *skb, struct ipv6hdr *ip)
{
	return !skb->vlan_present && skb->protocol == bpf_htons(ETH_P_IPV6) &&
	       !bpf_skb_load_bytes(skb, ETH_HLEN, ip, sizeof(*ip));
}

/*
 * Whether xdp_agent has rewritten the packet for another server, or for the balancer. On an
 * interface outside the domain, xdp_agent marks no packet, so a marked frame there is forged.
 */
static __always_inline bool left_for_next_segment(const struct __sk_buff *skb,
						  const struct ipv6hdr *ip)
{
	return !host_is_outside &&
	       (is_other_server(&ip->daddr) || sid_function(&ip->daddr) == SID_RETURN) &&
	       is_marked_own(skb);
}

#endif
