/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sends a packet on to the next server of its list (RFC 8754 section 4.3.1.1).
 *
 * This is done behind the XDP program, at tc ingress, because there the kernel
 * finds the next hop by itself, as for packets of its own: it resolves the
 * neighbour and holds the packet meanwhile. XDP would need bpf_fib_lookup, which
 * knows only neighbours that are resolved and insists on a forwarding interface;
 * to make a host forward, even on lo alone, deletes the default routes that it
 * learned from router advertisements.
 */
#ifndef SEGUE_AGENT_NEXT_SEGMENT_H
#define SEGUE_AGENT_NEXT_SEGMENT_H

#include <linux/pkt_cls.h>

#include "envelope.h"
#include "net/host.h"

/* Reads the IPv6 header of a packet behind XDP; false for any other packet. What was
 * behind a VLAN tag, which the kernel takes off in between, XDP has not seen. */
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

/* Whether xdp_agent left the packet for here. Nothing else that it lets pass is for this
 * host and a SID with a function. */
static __always_inline bool left_for_next_segment(const struct __sk_buff *skb,
						  const struct ipv6hdr *ip)
{
	return in_node_locator(&ip->daddr) && sid_function(&ip->daddr) != SID_HOST &&
	       is_to_host(skb);
}

/* Where the segment routing header is in the frame; 0: there is none. */
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

/* The checks of RFC 8754 section 4.3.1.1 once more. xdp_agent makes them for all that it
 * sees; what comes here must not be forwarded, whoever let it pass, with a hop limit
 * that wraps around, or to a segment that is beyond the list or no other server's. */
static __always_inline bool may_advance(const struct ipv6hdr *ip,
					const struct segment_routing_header *srh)
{
	return ip->hop_limit > 1 && srh->type == ROUTING_TYPE_SRH && srh->segments_left &&
	       srh->segments_left <= srh->last_entry + 1 &&
	       srh_size(srh->last_entry + 1) <= (srh->length + 1) * 8;
}

/* Makes the next segment the destination. */
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
