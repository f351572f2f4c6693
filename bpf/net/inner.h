/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The IP header of a packet inside another one.
 */
#ifndef SEGUE_NET_INNER_H
#define SEGUE_NET_INNER_H

#include "parse.h"

/* Fields of an inner IP header. */
struct inner_header {
	struct in6_addr source;
	struct in6_addr destination;
	__be16 ethertype;
	__u16 size;   /* bytes of the header; malformed headers may state too few */
	__u32 length; /* bytes of the packet, as the header states it */
	__u8 traffic_class;
	__u8 protocol;
	__u8 hop_limit;
	bool is_fragment; /* of IPv4; an IPv6 fragment has an extension header */
};

/* Reads an IPv4 header at the cursor, as read_inner_header does. */
static __always_inline bool read_inner_ipv4(const struct cursor *at, struct inner_header *inner)
{
	const struct iphdr *ip = at->pos;

	if (!has(at, sizeof(*ip)) || ip->version != 4)
		return false;
	map_ipv4(&inner->source, ip->saddr);
	map_ipv4(&inner->destination, ip->daddr);
	inner->ethertype = bpf_htons(ETH_P_IP);
	inner->size = ip->ihl * 4;
	inner->length = bpf_ntohs(ip->tot_len);
	inner->traffic_class = ip->tos;
	inner->protocol = ip->protocol;
	inner->hop_limit = ip->ttl;
	inner->is_fragment = ip->frag_off & bpf_htons(IP_FLAG_MF | IP_OFFSET_MASK);
	return true;
}

/* Reads an IPv6 header at the cursor, as read_inner_header does. */
static __always_inline bool read_inner_ipv6(const struct cursor *at, struct inner_header *inner)
{
	const struct ipv6hdr *ip = at->pos;

	if (!has(at, sizeof(*ip)) || ip->version != 6)
		return false;
	inner->source = ip->saddr;
	inner->destination = ip->daddr;
	inner->ethertype = bpf_htons(ETH_P_IPV6);
	inner->size = sizeof(*ip);
	inner->length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	inner->traffic_class = ipv6_traffic_class(ip);
	inner->protocol = ip->nexthdr;
	inner->hop_limit = ip->hop_limit;
	inner->is_fragment = false;
	return true;
}

/* Reads the header at the cursor, and leaves the cursor there. False when the frame ends too soon
 * or the header is not of the version that the EtherType states. */
static __always_inline bool read_inner_header(const struct cursor *at, __be16 ethertype,
					      struct inner_header *inner)
{
	if (ethertype == bpf_htons(ETH_P_IP))
		return read_inner_ipv4(at, inner);
	return read_inner_ipv6(at, inner);
}

/* Whether the stated lengths of header and packet agree, and fit in the `left` bytes of the outer
 * packet. */
static __always_inline bool inner_fits(const struct inner_header *inner, __u32 left)
{
	return inner->size >= sizeof(struct iphdr) && inner->length >= inner->size &&
	       inner->length <= left;
}

/* The EtherType of the packet behind an IP header with this next header: IPv4 or IPv6. */
static __always_inline __be16 inner_ethertype(__u8 next_header)
{
	return next_header == IPPROTO_IPIP ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
}

#endif
