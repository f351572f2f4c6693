/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Passes a packet on to the next server of its list (RFC 8754 section 4.3.1.1).
 *
 * This runs behind the XDP program, at tc ingress. There the kernel finds the next hop, as for its
 * own packets: it resolves the neighbour and holds the packet meanwhile. XDP would need
 * bpf_fib_lookup, which finds only resolved neighbours and requires a forwarding interface. To
 * enable forwarding on a host, even on lo alone, deletes the default routes from router
 * advertisements.
 */
#ifndef SEGUE_AGENT_NEXT_SEGMENT_H
#define SEGUE_AGENT_NEXT_SEGMENT_H

#include <linux/pkt_cls.h>

#include "envelope.h"
#include "net/host.h"

/* Reads the IPv6 header of a packet that XDP has seen. False for any other packet: XDP has not seen
 * packets in VLANs, whose tag the kernel removes between XDP and tc. */
static __always_inline bool read_behind_xdp(const struct __sk_buff *skb, struct ipv6hdr *ip)
{
	return !skb->vlan_present && skb->protocol == bpf_htons(ETH_P_IPV6) &&
	       !bpf_skb_load_bytes(skb, ETH_HLEN, ip, sizeof(*ip));
}

static __always_inline bool is_to_host(const struct __sk_buff *skb)
{
	__u64 destination;

	return !bpf_skb_load_bytes(skb, 0, &destination, sizeof(destination)) &&
	       is_host(&destination);
}

/* Whether xdp_agent left the packet to tc. It passes no other packet that is for this host and
 * to a SID with a function. */
static __always_inline bool left_for_next_segment(const struct __sk_buff *skb,
						  const struct ipv6hdr *ip)
{
	return in_node_locator(&ip->daddr) && sid_function(&ip->daddr) != SID_HOST &&
	       is_to_host(skb);
}

/* Offset of the segment routing header in the frame; 0: there is none. */
static __always_inline __u32 find_srh(const struct __sk_buff *skb, const struct ipv6hdr *ip)
{
	__u32 at = ETH_HLEN + sizeof(*ip);
	struct extension_header options;

	if (ip->nexthdr == IPPROTO_ROUTING)
		return at;
	if (ip->nexthdr != IPPROTO_HOPOPTS ||
	    bpf_skb_load_bytes(skb, at, &options, sizeof(options)) ||
	    options.next_header != IPPROTO_ROUTING)
		return 0;
	return at + (options.length + 1) * 8;
}

/* Repeats the checks of RFC 8754 section 4.3.1.1. xdp_agent makes them for every packet that it
 * sees. But no packet must ever be forwarded with a hop limit that wraps around, or to a segment
 * beyond the list. */
static __always_inline bool may_advance(const struct ipv6hdr *ip,
					const struct segment_routing_header *srh)
{
	return ip->hop_limit > 1 && srh->type == ROUTING_TYPE_SRH && srh->segments_left &&
	       srh->segments_left <= srh->last_entry + 1 &&
	       srh_size(srh->last_entry + 1) <= (srh->length + 1) * 8;
}

/* Makes the next segment the destination. False when the packet must be dropped. */
static __always_inline bool advance(struct __sk_buff *skb, const struct ipv6hdr *ip)
{
	__u32 at = find_srh(skb, ip);
	struct segment_routing_header srh;
	__u8 hop_limit = ip->hop_limit - 1;
	struct in6_addr segment;

	if (!at || bpf_skb_load_bytes(skb, at, &srh, sizeof(srh)) || !may_advance(ip, &srh))
		return false;
	srh.segments_left--;
	return !bpf_skb_load_bytes(skb, at + srh_size(srh.segments_left), &segment,
				   sizeof(segment)) &&
	       is_other_server(&segment) &&
	       !bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, daddr), &segment,
				    sizeof(segment), BPF_F_RECOMPUTE_CSUM) &&
	       !bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, hop_limit), &hop_limit,
				    sizeof(hop_limit), BPF_F_RECOMPUTE_CSUM) &&
	       !bpf_skb_store_bytes(
		       skb, at + offsetof(struct segment_routing_header, segments_left),
		       &srh.segments_left, sizeof(srh.segments_left), BPF_F_RECOMPUTE_CSUM);
}

#endif
