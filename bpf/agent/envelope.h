/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reads an envelope, the headers around a client's packet: which SID or tunnel of this node it came
 * to, which encapsulation it has, and to which VIP the client's packet is going.
 */
#ifndef SEGUE_AGENT_ENVELOPE_H
#define SEGUE_AGENT_ENVELOPE_H

#include "maps.h"
#include "net/gre.h"
#include "net/inner.h"
#include "net/parse.h"
#include "net/srv6.h"
#include "stats.h"

/* The node's locator, in memory order, replaced by one store; 0: the node has none. */
volatile __u64 node_locator;

/* The headers around a client's packet. */
struct envelope {
	struct in6_addr vip;
	__u64 sender;	     /* the balancer's locator, in memory order */
	__u64 first_segment; /* locator of the list's first segment, if it was visited; else 0 */
	__u64 sid_low;	     /* of this server's SID, in memory order; 0 in a tunnel */
	__be16 ethertype;    /* of the packet to deliver */
	__u16 options;	     /* bytes of hop-by-hop options */
	__u16 srh;	     /* bytes of the segment routing header; 0: none */
	__u16 size;	     /* bytes of all headers in front of the inner packet */
	__u8 encapsulation;  /* enum encapsulation */
	__u8 hop_limit;
	__u8 traffic_class;
	__u8 inner_class; /* the inner packet's TOS or traffic class */
	__u8 segments_left;
	__u8 last_entry;
	__u8 next_header; /* behind the headers read so far */
	bool inner_fits;  /* the inner packet's length agrees with the outer one's */
};

/* The function of the SID to which the envelope came; SID_HOST in a tunnel. */
static __always_inline enum sid_function function_of(const struct envelope *envelope)
{
	return sid_low_function(envelope->sid_low);
}

/* The locator of a SID, in memory order. */
static __always_inline __u64 locator_of(const struct in6_addr *sid)
{
	__u64 locator;

	__builtin_memcpy(&locator, sid, sizeof(locator));
	return locator;
}

static __always_inline bool in_node_locator(const struct in6_addr *address)
{
	__u64 locator = locator_of(address);

	return locator && locator == node_locator;
}

static __always_inline bool is_multicast(const struct in6_addr *address)
{
	return address->s6_addr[0] == 0xff;
}

static __always_inline bool is_tunnel(__u8 protocol)
{
	return protocol == IPPROTO_GRE || protocol == IPPROTO_IPIP || protocol == IPPROTO_IPV6;
}

/* Moves the cursor over `size` bytes of outer headers. */
static __always_inline void peel(struct cursor *at, struct envelope *envelope, __u32 size)
{
	skip(at, size);
	envelope->size += size;
}

/* Reads the header of the inner packet. False when there is none. */
static __always_inline bool read_inner(const struct cursor *at, struct envelope *envelope,
				       __be16 ethertype)
{
	struct inner_header inner;

	if (!read_inner_header(at, ethertype, &inner))
		return false;
	envelope->vip = inner.destination;
	envelope->ethertype = inner.ethertype;
	envelope->inner_class = inner.traffic_class;
	envelope->inner_fits = inner_fits(&inner, at->left);
	return true;
}

/* Reads the headers behind the outer header of a tunnel to this node. Packets in other formats
 * than a balancer's may belong to another tunnel between the same addresses: they pass. */
static __always_inline enum agent_reason read_tunnel(struct cursor *at, struct envelope *envelope)
{
	__be16 ethertype = inner_ethertype(envelope->next_header);

	envelope->encapsulation = ENCAP_IPIP;
	if (envelope->next_header == IPPROTO_GRE) {
		const struct gre_header *gre = at->pos;

		if (!has(at, sizeof(*gre)) || gre->flags)
			return AGENT_PASS_GRE;
		ethertype = gre->protocol;
		if (ethertype != bpf_htons(ETH_P_IP) && ethertype != bpf_htons(ETH_P_IPV6))
			return AGENT_PASS_GRE;
		envelope->encapsulation = ENCAP_GRE;
		peel(at, envelope, sizeof(*gre));
	}
	return read_inner(at, envelope, ethertype) ? AGENT_NONE : AGENT_PASS_OTHER_TUNNEL;
}

/* Reads an IPv4 packet up to the VIP, if it is of a tunnel to this node. */
static __always_inline enum agent_reason read_ipv4(struct cursor *at, struct envelope *envelope)
{
	const struct iphdr *ip = at->pos;
	struct in6_addr destination;

	if ((void *)(ip + 1) > at->end)
		return AGENT_PASS_IP_HEADER;
	map_ipv4(&destination, ip->daddr);
	if (!is_tunnel(ip->protocol) || !bpf_map_lookup_elem(&tunnel_addresses, &destination))
		return AGENT_PASS_NOT_FOR_AGENT;
	if (ip->version != 4 || ip->ihl < 5 || bpf_ntohs(ip->tot_len) < ip->ihl * 4 ||
	    !limit(at, bpf_ntohs(ip->tot_len)))
		return AGENT_PASS_IP_HEADER;
	if (ip->frag_off & bpf_htons(IP_FLAG_MF | IP_OFFSET_MASK))
		return AGENT_PASS_FRAGMENT;
	envelope->traffic_class = ip->tos;
	envelope->next_header = ip->protocol;
	peel(at, envelope, ip->ihl * 4);
	return read_tunnel(at, envelope);
}

/* Reads hop-by-hop options, which stay in front of an inserted segment routing header. False: they
 * are longer than the packet. */
static __always_inline bool read_options(struct cursor *at, struct envelope *envelope)
{
	const struct extension_header *header = at->pos;
	__u32 size;

	if (!has(at, sizeof(*header)))
		return false;
	size = (header->length + 1) * 8;
	if (size > at->left)
		return false;
	envelope->options = size;
	envelope->next_header = header->next_header;
	peel(at, envelope, size);
	return true;
}

/*
 * Reads a segment routing header, with the checks of RFC 8754 section 4.3.1.1. `segments_left` may
 * be larger than `last_entry` by one, because a reduced header leaves out the first segment
 * (section 4.1.1). TLVs behind the list are skipped (section 2.1).
 */
static __always_inline enum agent_reason read_srh(struct cursor *at, struct envelope *envelope)
{
	const struct segment_routing_header *srh = at->pos;
	const struct in6_addr *first;
	__u32 size;

	if (!has(at, srh_size(1)))
		return AGENT_DROP_SRH_TRUNCATED;
	if (srh->type != ROUTING_TYPE_SRH)
		return AGENT_DROP_ROUTING_TYPE;
	size = (srh->length + 1) * 8;
	if (size > at->left)
		return AGENT_DROP_SRH_TRUNCATED;
	if (srh_size(srh->last_entry + 1) > size)
		return AGENT_DROP_SRH_LAST_ENTRY;
	if (srh->segments_left > srh->last_entry + 1)
		return AGENT_DROP_SRH_SEGMENTS_LEFT;
	first = &srh->segment[srh->last_entry];
	if ((void *)(first + 1) > at->end)
		return AGENT_DROP_SRH_TRUNCATED; /* never: this check is for the verifier */
	if (srh->segments_left < srh->last_entry)
		envelope->first_segment = locator_of(first);
	envelope->vip = srh->segment[0];
	envelope->srh = size;
	envelope->segments_left = srh->segments_left;
	envelope->last_entry = srh->last_entry;
	envelope->next_header = srh->next_header;
	peel(at, envelope, size);
	return AGENT_NONE;
}

/*
 * Finds the sender of an inserted list, the balancer: it is the first segment. The function
 * `deliver` needs no sender, so there the first segment may be missing (a reduced header).
 */
static __always_inline enum agent_reason read_inserted(struct envelope *envelope)
{
	envelope->encapsulation = ENCAP_SRV6_INSERT;
	if (!envelope->segments_left)
		return AGENT_DROP_SRH_SEGMENTS_LEFT;
	if (function_of(envelope) != SID_DELIVER && !envelope->first_segment)
		return AGENT_DROP_SRH_SEGMENTS_LEFT;
	envelope->sender = envelope->first_segment;
	return AGENT_NONE;
}

/* How many servers the packet can still visit, with this one. In an inserted header the VIP is a
 * segment too. */
static __always_inline __u32 servers_left(const struct envelope *envelope)
{
	return envelope->segments_left + (envelope->encapsulation != ENCAP_SRV6_INSERT);
}

/* Whether this server is the last of the list. */
static __always_inline bool is_last_server(const struct envelope *envelope)
{
	return servers_left(envelope) <= 1;
}

/* Reads the headers behind the IPv6 header of a packet to a SID, up to the VIP. */
static __always_inline enum agent_reason read_segments(struct cursor *at, struct envelope *envelope)
{
	if (envelope->next_header == IPPROTO_HOPOPTS && !read_options(at, envelope))
		return AGENT_DROP_EXTENSION;
	if (envelope->next_header == IPPROTO_ROUTING) {
		enum agent_reason why = read_srh(at, envelope);

		if (why)
			return why;
	}
	if (envelope->next_header == IPPROTO_IPIP || envelope->next_header == IPPROTO_IPV6) {
		envelope->encapsulation = ENCAP_SRV6_ENCAP;
		if (!read_inner(at, envelope, inner_ethertype(envelope->next_header)))
			return AGENT_DROP_INNER_HEADER;
		return AGENT_NONE;
	}
	if (!envelope->srh)
		return envelope->next_header == IPPROTO_FRAGMENT ? AGENT_DROP_FRAGMENT
								 : AGENT_DROP_NOT_ENCAPSULATED;
	return read_inserted(envelope);
}

/* Whether a function is one that servers apply to packets to VIPs. */
static __always_inline bool is_vip_function(__u16 function)
{
	return function >= SID_CONNECT_AVAIL && function <= SID_STEER;
}

static __always_inline bool is_server_function(__u16 function)
{
	return is_vip_function(function) || function == SID_PROBE;
}

/* Whether a packet may travel on to this segment: only to another server. A balancer would take the
 * packet for a signal of this server, whoever sent it. */
static __always_inline bool is_other_server(const struct in6_addr *segment)
{
	return is_vip_function(sid_function(segment)) && !in_node_locator(segment) &&
	       !is_multicast(segment);
}

/* Whether the packet came through a tunnel, and not to a SID. */
static __always_inline bool is_tunneled(const struct envelope *envelope)
{
	return envelope->encapsulation == ENCAP_GRE || envelope->encapsulation == ENCAP_IPIP;
}

/* Whether this server serves the VIP. vip_lines is searched first, because it is faster; the table
 * `vips` has all VIPs. In both, the IPv4-mapped form means IPv4, so no IPv6 packet may have it. */
static __always_inline bool is_served(const struct envelope *envelope)
{
	if (envelope->ethertype != bpf_htons(ETH_P_IP) && is_ipv4(&envelope->vip))
		return false;
	return is_in_vip_lines(&envelope->vip) || bpf_map_lookup_elem(&vips, &envelope->vip);
}

/* Offset of the segment routing header in the frame, if there is one. */
static __always_inline __u32 srh_offset(const struct envelope *envelope)
{
	return ETH_HLEN + sizeof(struct ipv6hdr) + envelope->options;
}

/* An entry of the segment list, in the frame. NULL if the frame is too short. */
static __always_inline struct in6_addr *list_entry(const struct xdp_md *ctx,
						   const struct envelope *envelope, __u32 index)
{
	/* The mask is for the verifier: options, and a list of 256 segments, are shorter. */
	struct in6_addr *entry =
		frame_start(ctx) + ((srh_offset(envelope) + srh_size(index)) & 0x1fff);

	return (void *)(entry + 1) <= frame_end(ctx) ? entry : NULL;
}

/* Reads an entry of the segment list. False: the frame is too short. */
static __always_inline bool load_entry(const struct xdp_md *ctx, const struct envelope *envelope,
				       __u32 index, struct in6_addr *entry)
{
	const struct in6_addr *at = list_entry(ctx, envelope, index);

	if (at)
		copy_address(entry, at);
	return at;
}

/* Reads a packet to a SID of this node up to the VIP. */
static __always_inline enum agent_reason read_sid(struct cursor *at, struct envelope *envelope)
{
	const struct ipv6hdr *ip = at->pos;
	enum agent_reason why;

	if ((void *)(ip + 1) > at->end)
		return AGENT_PASS_IP_HEADER;
	envelope->sid_low = low_bits_of(&ip->daddr);
	envelope->sender = locator_of(&ip->saddr);
	if (function_of(envelope) == SID_HOST)
		return AGENT_PASS_HOST;
	if (!is_server_function(function_of(envelope)))
		return AGENT_DROP_UNKNOWN_FUNCTION;
	if (ip->version != 6 || !limit(at, sizeof(*ip) + bpf_ntohs(ip->payload_len)))
		return AGENT_DROP_IP_HEADER;
	envelope->next_header = ip->nexthdr;
	peel(at, envelope, sizeof(*ip));
	why = read_segments(at, envelope);
	return !why && servers_left(envelope) > MAX_SEGMENTS ? AGENT_DROP_TOO_MANY_SERVERS : why;
}

/* Reads an IPv6 packet up to the VIP, if it is to a SID of this node, or of a tunnel to it. */
static __always_inline enum agent_reason read_ipv6(struct cursor *at, struct envelope *envelope)
{
	const struct ipv6hdr *ip = at->pos;

	if ((void *)(ip + 1) > at->end)
		return AGENT_PASS_IP_HEADER;
	envelope->traffic_class = ipv6_traffic_class(ip);
	envelope->hop_limit = ip->hop_limit;
	if (in_node_locator(&ip->daddr))
		return read_sid(at, envelope);
	if (!is_tunnel(ip->nexthdr) || is_ipv4(&ip->daddr) ||
	    !bpf_map_lookup_elem(&tunnel_addresses, &ip->daddr))
		return AGENT_PASS_NOT_FOR_AGENT;
	if (ip->version != 6 || !limit(at, sizeof(*ip) + bpf_ntohs(ip->payload_len)))
		return AGENT_PASS_IP_HEADER;
	envelope->next_header = ip->nexthdr;
	peel(at, envelope, sizeof(*ip));
	return read_tunnel(at, envelope);
}

/*
 * Whether a frame from outside the domain must be dropped: it is to a SID with a function (RFC 8754
 * section 5.1), or to a VIP with segments left. Not inlined: few interfaces are outside.
 */
__noinline int is_intruder(struct xdp_md *ctx)
{
	struct fragment fragment = {};
	struct packet pkt = {};
	struct cursor at = {};
	enum parse_result result = parse_network(ctx, &at, &pkt, &fragment);

	if (pkt.ethertype != bpf_htons(ETH_P_IPV6))
		return false;
	if (in_node_locator(&pkt.key.destination))
		return sid_function(&pkt.key.destination) != SID_HOST;
	return result == PARSE_SEGMENTS_LEFT && bpf_map_lookup_elem(&vips, &pkt.key.destination);
}

/* Reads a frame up to the VIP. AGENT_NONE: the VIP was found. `envelope` must be zero. */
static __always_inline enum agent_reason read_envelope(const struct xdp_md *ctx,
						       struct envelope *envelope)
{
	struct cursor at = { .pos = frame_start(ctx), .end = frame_end(ctx) };
	const struct ethhdr *ethernet = at.pos;

	if ((void *)(ethernet + 1) > at.end)
		return AGENT_PASS_NOT_IP;
	at.pos = (void *)(ethernet + 1);
	if (ethernet->h_proto == bpf_htons(ETH_P_IP))
		return read_ipv4(&at, envelope);
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6))
		return read_ipv6(&at, envelope);
	return AGENT_PASS_NOT_IP;
}

#endif
