/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The four encapsulations, with the bytes that each adds for n segments:
 *
 *	srv6-insert	8 + 16 (n + 2)			RFC 8754; 56 for one, 72 for two
 *	srv6-encap	40, and 8 + 16 (n - 1) if n > 1	RFC 8986 section 5.2; 40, 64
 *			40, and 8 + 16 n if n > 1	offers, which keep the whole list; 40, 80
 *	gre		4 + outer header		RFC 2784, RFC 7676; 44 over IPv6
 *	ipip		outer header			RFC 2003, RFC 2473; 40 over IPv6
 *
 * On a fabric without IPv6, srv6-encap also gets the 28 bytes of the underlay (net/underlay.h).
 *
 * Outer headers copy DSCP (RFC 2983, the uniform model) and ECN (RFC 6040
 * section 4.1), and take their flow label from the flow's hash (RFC 6438).
 */
#ifndef SEGUE_BALANCER_PATH_ENCAP_H
#define SEGUE_BALANCER_PATH_ENCAP_H

#include "net/gre.h"
#include "net/hash.h"
#include "balancer/tables/maps.h"
#include "net/parse.h"
#include "balancer/segments.h"
#include "net/srv6.h"
#include "net/underlay.h"

#define FLOW_LABEL_MASK 0xfffff
#define IP_FLAG_DF 0x4000
/* The most bytes of hop-by-hop options: their length is a byte, in units of 8 bytes. */
#define MAX_HOP_BY_HOP 2048

/* What to encapsulate, and how. */
struct encap {
	const struct packet *pkt;
	const struct segments *segments;
	const struct server *server; /* the first one to visit */
	__u32 flow_label;	     /* a hash of the flow; its low bits are the label */
	__u32 count;		     /* of segments */
	__u32 size;		     /* bytes to add, without those of the underlay */
	__u32 underlay;		     /* bytes of the underlay: a constant where it is used */
	void *layer3;		     /* where the headers go, once there is room */
	const void *end;	     /* of the frame */
};

/* Bytes that the underlay adds to an encapsulation. It carries srv6-encap only: no service with an
 * underlay has srv6-insert (internal/desired). */
static __always_inline __u32 underlay_size(enum encapsulation kind)
{
	return underlay_port && kind == ENCAP_SRV6_ENCAP ? UNDERLAY_SIZE : 0;
}

/* Bytes of the outer IP header of a tunnel to a server. */
static __always_inline __u32 outer_size(const struct server *server)
{
	return server->flags & SERVER_IPV4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
}

/* How many servers are in the routing header of srv6-encap, for lists of two or more. It leaves out
 * the first one, which is the outer destination, unless the list is kept whole. */
static __always_inline __u32 listed_servers(const struct encap *encap)
{
	return encap->count - 1 + encap->segments->keeps_whole;
}

/* Bytes that an encapsulation adds to the packet. */
static __always_inline __u32 encap_size(enum encapsulation kind, const struct encap *encap)
{
	switch (kind) {
	case ENCAP_SRV6_INSERT:
		return srh_size(encap->count + 2);
	case ENCAP_SRV6_ENCAP:
		return sizeof(struct ipv6hdr) +
		       (encap->count > 1 ? srh_size(listed_servers(encap)) : 0);
	case ENCAP_GRE:
		return outer_size(encap->server) + sizeof(struct gre_header);
	case ENCAP_IPIP:
		return outer_size(encap->server);
	}
	return 0;
}

static __always_inline __be16 outer_ethertype(enum encapsulation kind, const struct encap *encap)
{
	bool is_tunnel = kind == ENCAP_GRE || kind == ENCAP_IPIP;

	if (encap->underlay)
		return bpf_htons(ETH_P_IP);
	return bpf_htons(is_tunnel && encap->server->flags & SERVER_IPV4 ? ETH_P_IP : ETH_P_IPV6);
}

/* Decrements the hop limit, as a forwarder does: RFC 8986 section 5, RFC 2473 section 3.1, RFC 2003
 * section 3.1. Updates IPv4's checksum by RFC 1624. False: the frame is too short. */
static __always_inline bool take_hop(const struct xdp_md *ctx, const struct packet *pkt)
{
	void *layer3 = frame_start(ctx) + ETH_HLEN;

	if (pkt->ethertype == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = layer3;

		if ((void *)(ip + 1) > frame_end(ctx))
			return false;
		ip->hop_limit--;
	} else {
		struct iphdr *ip = layer3;
		__u32 sum;

		if ((void *)(ip + 1) > frame_end(ctx))
			return false;
		sum = ip->check + bpf_htons(0x0100);
		ip->check = sum + (sum >= 0xffff);
		ip->ttl--;
	}
	return true;
}

/* The protocol number by which an outer header announces the client's packet. */
static __always_inline __u8 inner_protocol(const struct packet *pkt)
{
	return pkt->ethertype == bpf_htons(ETH_P_IPV6) ? IPPROTO_IPV6 : IPPROTO_IPIP;
}

/* Writes the SID of the first server. */
static __always_inline void write_first_sid(struct in6_addr *out, const struct encap *encap)
{
	const struct server *server = encap->server;

	write_sid(out, &server->address, encap->segments->first_sid ?: server->known_sid);
}

/* Writes the segment list. The last segment comes first (RFC 8754). A reduced header leaves out the
 * segment that is visited first. A list that was shortened keeps its last server, which may be
 * asked something else than the others. False: the frame is too short. */
static __always_inline bool write_segments(struct in6_addr *out, const struct encap *encap,
					   bool reduced)
{
	const struct segments *segments = encap->segments;
	const void *end = encap->end;

	/* i == 1 is the last server of the whole list, even if the list is shortened. */
	for (__u32 i = 1; i < encap->count && i < MAX_SEGMENTS; i++) {
		__u32 at = ((i == 1 ? segments->count : encap->count) - i) & SEGMENTS_MASK;
		const struct server *server = server_at(segments->server[at]);
		__u32 sid = i == 1 ? segments->last_sid : segments->sid;

		if ((void *)(out + 1) > end)
			return false;
		write_sid(out++, &server->address, sid | argument_of(segments, at));
		/* Otherwise the compiler would check one register and write through another. */
		barrier_var(out);
	}
	if (reduced)
		return true;
	if ((void *)(out + 1) > end)
		return false;
	write_first_sid(out, encap);
	return true;
}

/* Writes a segment routing header without its list. `entries` is the length of the list. */
static __always_inline void start_srh(struct segment_routing_header *srh, __u8 next_header,
				      __u32 entries, __u32 segments_left)
{
	/* All fields in one store, in their order. Flags and tag are zero. */
	*(__u64 *)srh = next_header | (entries * 2) << 8 | ROUTING_TYPE_SRH << 16 |
			segments_left << 24 | (__u64)(entries - 1) << 32;
}

/*
 * Moves hop-by-hop options `distance` bytes towards the front, because they must stay right behind
 * the IPv6 header. Returns 0, or -1 when the frame is too short. Not inlined: the verifier walks
 * the loop once, and almost no packet has options.
 */
__noinline int move_hop_by_hop(struct xdp_md *ctx, __u32 distance, __u32 size)
{
	void *options = frame_start(ctx) + ETH_HLEN + sizeof(struct ipv6hdr);

	for (__u32 i = 0; i < MAX_HOP_BY_HOP && i < size; i += sizeof(__u64)) {
		__u64 *to = options + i;
		__u64 *from = (void *)to + (distance & 0xff);

		if ((void *)(to + 1) > frame_end(ctx) || (void *)(from + 1) > frame_end(ctx))
			return -1;
		*to = *from;
	}
	return 0;
}

/* Writes the routing header of srv6-insert. In order of travel it lists lb, s1, ..., sn, VIP. The
 * balancer is the first segment, and visited already. False: the frame is too short. */
static __always_inline bool write_srh(struct segment_routing_header *srh, const struct encap *encap,
				      __u8 next_header)
{
	const void *end = encap->end;
	__u32 count = encap->count;
	struct in6_addr *segment;

	if ((void *)srh + srh_size(1) > end)
		return false;
	start_srh(srh, next_header, count + 2, count);
	copy_address(&srh->segment[0], &encap->pkt->key.destination);
	if (!write_segments(&srh->segment[1], encap, false))
		return false;
	segment = &srh->segment[(count & SEGMENTS_MASK) + 1];
	if ((void *)(segment + 1) > end)
		return false;
	copy_address(segment, &encap->server->source);
	return true;
}

/* Writes the routing header of srv6-insert behind hop-by-hop options. These stay right behind the
 * IPv6 header. False: the frame is too short. */
static __always_inline bool write_srh_behind(struct xdp_md *ctx, const struct encap *encap,
					     __u32 options)
{
	struct extension_header *first = encap->layer3 + sizeof(struct ipv6hdr);
	__u8 next_header;

	if (move_hop_by_hop(ctx, encap->size, options) || (void *)(first + 1) > encap->end)
		return false;
	((struct ipv6hdr *)encap->layer3)->nexthdr = IPPROTO_HOPOPTS;
	next_header = first->next_header;
	first->next_header = IPPROTO_ROUTING;
	return write_srh((void *)first + options, encap, next_header);
}

/* The second word of a forwarded packet's IPv6 header: payload length, next header and hop limit.
 * The hop limit is the client's minus one. */
static __always_inline __u32 second_word(const struct encap *encap, __u8 next_header)
{
	__u16 payload = encap->pkt->length + encap->size - sizeof(struct ipv6hdr);

	return bpf_htons(payload) | next_header << 16 | (encap->pkt->hop_limit - 1U) << 24;
}

/* Inserts a segment routing header behind the IPv6 header. The source remains the client. `ctx` is
 * NULL for packets without hop-by-hop options. False: the frame is too short. */
static __always_inline bool write_srv6_insert(struct xdp_md *ctx, const struct encap *encap)
{
	struct ipv6hdr *ip = encap->layer3;
	struct ipv6hdr *old = (void *)ip + (encap->size & 0xff);
	__u32 options = encap->pkt->hop_by_hop & (2 * MAX_HOP_BY_HOP - 1);
	__u8 next_header;

	if ((void *)(old + 1) > encap->end || (void *)(ip + 1) > encap->end)
		return false;
	next_header = old->nexthdr;
	((__be32 *)ip)[0] = ((const __be32 *)old)[0];
	((__be32 *)ip)[1] = second_word(encap, IPPROTO_ROUTING);
	copy_address(&ip->saddr, &old->saddr);
	write_first_sid(&ip->daddr, encap);
	if (ctx && options)
		return write_srh_behind(ctx, encap, options);
	return write_srh((void *)(ip + 1), encap, next_header);
}

/* Writes an outer IPv6 header in front of the packet, except its destination. */
static __always_inline void start_outer_ipv6(struct ipv6hdr *ip, const struct encap *encap,
					     __u8 next_header)
{
	__u8 class = traffic_class(encap->pkt);

	*(__be32 *)ip =
		bpf_htonl(6 << 28 | (__u32) class << 20 | (encap->flow_label & FLOW_LABEL_MASK));
	ip->payload_len = bpf_htons(encap->pkt->length + encap->size - sizeof(*ip));
	ip->nexthdr = next_header;
	ip->hop_limit = OUTER_HOP_LIMIT;
	copy_address(&ip->saddr, &encap->server->source);
}

/* Writes the headers of srv6-encap: H.Encaps.Red (RFC 8986 section 5.2). The first segment is then
 * only in the outer destination, unless the list is kept whole (H.Encaps, section 5.1). */
static __always_inline bool write_srv6_encap(const struct encap *encap)
{
	const void *end = encap->end;
	struct ipv6hdr *ip = encap->layer3;
	struct segment_routing_header *srh = (void *)(ip + 1);
	__u32 count = encap->count;

	if ((void *)(ip + 1) > end)
		return false;
	start_outer_ipv6(ip, encap, count > 1 ? IPPROTO_ROUTING : inner_protocol(encap->pkt));
	write_first_sid(&ip->daddr, encap);
	if (count <= 1)
		return true;
	if ((void *)(srh + 1) > end)
		return false;
	start_srh(srh, inner_protocol(encap->pkt), listed_servers(encap), count - 1);
	return write_segments(srh->segment, encap, !encap->segments->keeps_whole);
}

/* The checksum of an IPv4 header that has no options, and 0 in its checksum field. */
static __always_inline __be16 ipv4_checksum(const struct iphdr *ip)
{
	const __u16 *half = (const __u16 *)ip;
	__u32 sum = 0;

#pragma unroll
	for (int i = 0; i < sizeof(*ip) / 2; i++)
		sum += half[i];
	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

/* The outer source of an IPv4 tunnel. The server's mask `varied` says which bits of the source
 * depend on the flow; 0: none. IPv4 has no flow label, and routers and network cards do not look
 * behind the outer header. So with one source, all packets of a balancer to a server would arrive
 * in one receive queue. The flow's hash is linear in its ports. It is mixed, to spread the ports of
 * one client over the sources. */
static __always_inline __be32 outer_ipv4_source(const struct encap *encap)
{
	const struct server *server = encap->server;
	__be32 source = server->source.s6_addr32[3], varied = server->varied;

	return varied ? (source & ~varied) | (mix(encap->flow_label) & varied) : source;
}

/* Writes the outer IPv4 header of a tunnel. Its identification may be 0, because DF is set (RFC
 * 6864). */
static __always_inline void write_outer_ipv4(struct iphdr *ip, const struct encap *encap,
					     __u8 protocol)
{
	struct iphdr outer = {
		.version = 4,
		.ihl = 5,
		.tos = traffic_class(encap->pkt),
		.tot_len = bpf_htons(encap->pkt->length + encap->size),
		.frag_off = bpf_htons(IP_FLAG_DF),
		.ttl = OUTER_HOP_LIMIT,
		.protocol = protocol,
		.saddr = outer_ipv4_source(encap),
		.daddr = encap->server->address.s6_addr32[3],
	};

	outer.check = ipv4_checksum(&outer);
	*ip = outer;
}

/* Writes the outer header of a tunnel. Returns the position behind it, or NULL when the frame is
 * too short. */
static __always_inline void *write_outer(const struct encap *encap, __u8 protocol)
{
	if (encap->server->flags & SERVER_IPV4) {
		struct iphdr *ip = encap->layer3;

		if ((void *)(ip + 1) > encap->end)
			return NULL;
		write_outer_ipv4(ip, encap, protocol);
		return ip + 1;
	} else {
		struct ipv6hdr *ip = encap->layer3;

		if ((void *)(ip + 1) > encap->end)
			return NULL;
		start_outer_ipv6(ip, encap, protocol);
		copy_address(&ip->daddr, &encap->server->address);
		return ip + 1;
	}
}

/* Writes the headers of a GRE tunnel. False: the frame is too short. */
static __always_inline bool write_gre(const struct encap *encap)
{
	struct gre_header *gre = write_outer(encap, IPPROTO_GRE);

	if (!gre || (void *)(gre + 1) > encap->end)
		return false;
	gre->flags = 0;
	gre->protocol = encap->pkt->ethertype;
	return true;
}

/* Writes the header of an IP-in-IP tunnel. False: the frame is too short. */
static __always_inline bool write_ipip(const struct encap *encap)
{
	return write_outer(encap, inner_protocol(encap->pkt));
}

/* Writes the headers of an encapsulation. Only packets with hop-by-hop options need `ctx`; it is
 * NULL for others. False: the frame is too short. */
static __always_inline bool write_headers(struct xdp_md *ctx, enum encapsulation kind,
					  const struct encap *encap)
{
	switch (kind) {
	case ENCAP_SRV6_INSERT:
		return write_srv6_insert(ctx, encap);
	case ENCAP_SRV6_ENCAP:
		return write_srv6_encap(encap);
	case ENCAP_GRE:
		return write_gre(encap);
	case ENCAP_IPIP:
		return write_ipip(encap);
	}
	return false;
}

/* Grows the frame by all bytes to add. If the driver left too little room for a long list, the list
 * is shortened to FEW_SEGMENTS, or to FEW_UNDERLAID. False: there is no room for that list
 * either. */
static __always_inline bool grow(struct xdp_md *ctx, enum encapsulation kind, struct encap *encap)
{
	const __u32 few = encap->underlay ? FEW_UNDERLAID : FEW_SEGMENTS;

	if (!bpf_xdp_adjust_head(ctx, -(int)(encap->size + encap->underlay)))
		return true;
	if (encap->count <= few)
		return false;
	encap->count = few;
	encap->size = encap_size(kind, encap);
	return !bpf_xdp_adjust_head(ctx, -(int)(encap->size + encap->underlay));
}

/* Writes the headers of the underlay, and makes them the start of layer 3. False: the frame is too
 * short. */
static __always_inline bool underlay(struct encap *encap)
{
	struct underlay_header *outer = encap->layer3;
	const struct ipv6hdr *ip = (void *)(outer + 1);
	const struct server *server = encap->server;

	if ((void *)(ip + 1) > encap->end)
		return false;
	write_underlay(outer, *(const __u64 *)&server->source, *(const __u64 *)&server->address,
		       traffic_class(encap->pkt), encap->pkt->length + encap->size,
		       underlay_source_port(encap->flow_label));
	return true;
}

/* Writes all headers but Ethernet's. There is room for them at `layer3`. */
static __always_inline bool write_all(struct xdp_md *ctx, enum encapsulation kind,
				      struct encap *encap, void *layer3)
{
	encap->layer3 = layer3 + encap->underlay;
	if (!write_headers(ctx, kind, encap))
		return false;
	encap->layer3 = layer3;
	return !encap->underlay || underlay(encap);
}

/* Makes room for the headers, and writes all but Ethernet's. False when the driver left too little
 * headroom; the frame is then unusable. */
static __always_inline bool encapsulate(struct xdp_md *ctx, enum encapsulation kind,
					struct encap *encap)
{
	/* srv6-insert copies the IPv6 header, and decrements the hop limit as it copies. */
	if (kind != ENCAP_SRV6_INSERT && !take_hop(ctx, encap->pkt))
		return false;
	if (!grow(ctx, kind, encap))
		return false;
	encap->end = frame_end(ctx);
	return write_all(ctx, kind, encap, frame_start(ctx) + ETH_HLEN);
}

/* Writes the Ethernet header. It uses words instead of the packed struct, for which the compiler
 * would store single bytes. False: the frame is too short. */
static __always_inline bool write_ethernet(const struct encap *encap, __u64 next_hop,
					   const struct port *port, __be16 ethertype)
{
	void *ethernet = encap->layer3 - ETH_HLEN;

	if (encap->layer3 > encap->end)
		return false;
	/* The second word overwrites the port's number, which the first one contains. */
	*(__u64 *)ethernet = next_hop;
	*(__u64 *)(ethernet + ETH_ALEN) = port->mac | (__u64)ethertype << 48;
	return true;
}

#endif
