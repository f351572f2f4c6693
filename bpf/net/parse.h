/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Parsing: from a frame to a flow key. Every access is bounded by the frame *and* by
 * the length that the IP header states, so that Ethernet padding is never read
 * as a header.
 */
#ifndef SEGUE_NET_PARSE_H
#define SEGUE_NET_PARSE_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "types.h"

#define IP_FLAG_MF 0x2000
#define IP_OFFSET_MASK 0x1fff
#define IP6_FRAGMENT_OFFSET 0xfff8	   /* RFC 8200 section 4.5 */
#define IP6_FRAGMENT_OFFSET_OR_MORE 0xfff9 /* the offset, and the flag "more fragments" */

/* Longer chains exist only to confuse middleboxes (RFC 9288 section 3.5). */
#define MAX_EXTENSION_HEADERS 8

enum tcp_flag {
	TCP_FIN = 0x01,
	TCP_SYN = 0x02,
	TCP_RST = 0x04,
	TCP_PSH = 0x08,
	TCP_ACK = 0x10,
};

/* How far a packet could be parsed. A packet with PARSE_OTHER_PROTOCOL or PARSE_SEGMENTS_LEFT is
 * well-formed as far as it was read. A server's signal gives one of these two results. */
enum parse_result {
	PARSE_OK,
	PARSE_NOT_IP,	      /* another EtherType, or too short to tell */
	PARSE_IP_HEADER,      /* wrong version, destination or length */
	PARSE_EXTENSION,      /* IPv6 chain: truncated or too long */
	PARSE_SEGMENTS_LEFT,  /* a routing header has segments left to visit */
	PARSE_FRAGMENT,	      /* the transport header is missing or incomplete */
	PARSE_OTHER_PROTOCOL, /* neither TCP nor UDP; transport_offset() is where it begins */
	PARSE_TRANSPORT,      /* transport header truncated or inconsistent */
};

/* How a packet relates to the flow that its key names. */
enum packet_kind {
	PACKET_WHOLE, /* it has a transport header: a whole packet, or a first fragment */
	PACKET_LATER_FRAGMENT,
	PACKET_ICMP_ERROR, /* about a packet of the flow's other direction */
};

struct packet {
	struct flow_key key;
	__be16 ethertype; /* 0 until the IP header's addresses are known */
	__u16 length;	  /* of layer 3 */
	__u16 hop_by_hop; /* bytes of IPv6 hop-by-hop options */
	/* Offset of the transport header in the frame, if extension headers are in front of it;
	 * else 0. transport_offset() tells it in both cases. */
	__u16 transport;
	__be16 version_class; /* the first two bytes of the IP header */
	__u8 hop_limit;
	__u8 tcp_flags; /* enum tcp_flag; 0 for UDP */
	__u8 kind;	/* enum packet_kind */
	/* The bit fields: only the balancer's persistence sets them. */
	/* The bits of the cookie that the server of a new flow writes; 0: none. */
	__u8 cookie_width : 2;
	/* The SYN of a flow that gets neither a cookie nor a hint. It is offered to one server
	 * only. */
	__u8 is_single : 1;
	/* The packet visits all servers that may have its flow. Either a server without the flow
	 * has returned it, or no server could return it, because it is a fragment or has extension
	 * headers. */
	__u8 visits_all : 1;
	__u8 opens_quic : 1; /* an Initial or 0-RTT packet of QUIC */
	__u8 pad[2];
};

/*
 * A position in a frame. `left` counts the bytes from here to the end that the IP header states.
 * The verifier cannot follow `left`, so `end`, the end of the frame, is checked as well.
 */
struct cursor {
	void *pos;
	void *end;
	__u32 left;
};

struct extension_header {
	__u8 next_header;
	__u8 length; /* units of 8 bytes beyond the first 8 */
	__u8 type;
	__u8 segments_left; /* in a routing header */
};

struct fragment_header {
	__u8 next_header;
	__u8 reserved;
	__be16 offset;
	__be32 identification;
};

/* Which piece of a packet a fragment is. */
struct fragment {
	__be32 identification; /* IPv4: 16 bits */
	bool is_later;	       /* not the first fragment: it has no transport header */
};

static __always_inline void *frame_start(const struct xdp_md *ctx)
{
	return (void *)(long)ctx->data;
}

static __always_inline void *frame_end(const struct xdp_md *ctx)
{
	return (void *)(long)ctx->data_end;
}

/* Copies an address as two 64-bit words. The compiler may not rely on the alignment, and would copy
 * four words. */
static __always_inline void copy_address(struct in6_addr *to, const struct in6_addr *from)
{
	((__u64 *)to)[0] = ((const __u64 *)from)[0];
	((__u64 *)to)[1] = ((const __u64 *)from)[1];
}

/* Writes the whole word that is hashed: the protocol and its padding. */
static __always_inline void set_protocol(struct packet *pkt, __u8 protocol)
{
	*(__u32 *)&pkt->key.protocol = protocol;
}

/* Writes an IPv4 address in its IPv4-mapped form. */
static __always_inline void map_ipv4(struct in6_addr *out, __be32 address)
{
	out->s6_addr32[0] = 0;
	out->s6_addr32[1] = 0;
	out->s6_addr32[2] = bpf_htonl(0xffff);
	out->s6_addr32[3] = address;
}

/* Whether an address has the IPv4-mapped form. Here that form means IPv4, so no IPv6 packet may use
 * it. */
static __always_inline bool is_ipv4(const struct in6_addr *address)
{
	return !*(const __u64 *)address && address->s6_addr32[2] == bpf_htonl(0xffff);
}

static __always_inline bool same_address(const struct in6_addr *a, const struct in6_addr *b)
{
	const __u64 *x = (const __u64 *)a, *y = (const __u64 *)b;

	return x[0] == y[0] && x[1] == y[1];
}

static __always_inline __u8 ipv6_traffic_class(const struct ipv6hdr *ip)
{
	return ip->priority << 4 | ip->flow_lbl[0] >> 4;
}

/* IPv4's TOS or IPv6's traffic class: DSCP and ECN. */
static __always_inline __u8 traffic_class(const struct packet *pkt)
{
	__u16 first = bpf_ntohs(pkt->version_class);

	return pkt->ethertype == bpf_htons(ETH_P_IPV6) ? first >> 4 : first;
}

/* Whether a packet opens a connection. */
static __always_inline bool starts_connection(const struct packet *pkt)
{
	return (pkt->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

/* Whether a packet ends or resets a connection. */
static __always_inline bool ends_connection(const struct packet *pkt)
{
	return pkt->tcp_flags & (TCP_FIN | TCP_RST);
}

/* Whether a TCP header opens and ends a connection at once. No stack sends such a segment, and a
 * listening socket drops it. */
static __always_inline bool contradicts_itself(const struct packet *pkt)
{
	return pkt->tcp_flags & TCP_SYN && ends_connection(pkt);
}

/* Whether a packet neither opens nor ends a connection, as most do. */
static __always_inline bool is_plain(const struct packet *pkt)
{
	return !(pkt->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST));
}

/* Whether `size` bytes can be read at the cursor. */
static __always_inline bool has(const struct cursor *at, __u32 size)
{
	return at->pos + size <= at->end && size <= at->left;
}

/* Moves the cursor over `size` bytes. */
static __always_inline void skip(struct cursor *at, __u32 size)
{
	at->pos += size;
	at->left -= size;
}

/* Sets the cursor's `left` to the length of the packet that begins there. False: the frame ends
 * before the packet does. */
static __always_inline bool limit(struct cursor *at, __u32 length)
{
	__u32 distance = length;

	/* The verifier of Linux 6.1 does not know the bounds of a number whose bytes are swapped.
	 * So a mask states them. Without the barrier, the compiler would drop the mask. */
	barrier_var(distance);
	at->left = length;
	return at->pos + (distance & 0x1ffff) <= at->end;
}

/* Reads both ports at once. The hash loads them as one word. If two stores had written that word,
 * the load would wait until both are in the cache. */
static __always_inline void read_ports(struct packet *pkt, const void *transport)
{
	*(__u32 *)&pkt->key.source_port = *(const __u32 *)transport;
}

/* Parses the TCP or UDP header. `is_whole`: the frame holds the whole datagram, because the packet
 * is not a first fragment. */
static __always_inline enum parse_result parse_transport(struct cursor *at, struct packet *pkt,
							 bool is_whole)
{
	if (pkt->key.protocol == IPPROTO_TCP) {
		const __u8 *tcp = at->pos;
		__u32 size;

		if ((const void *)tcp + sizeof(struct tcphdr) > at->end)
			return PARSE_TRANSPORT;
		size = (tcp[12] >> 4) * 4;
		if (size < sizeof(struct tcphdr) || size > at->left)
			return PARSE_TRANSPORT;
		read_ports(pkt, tcp);
		pkt->tcp_flags = tcp[13];
		return PARSE_OK;
	}
	if (pkt->key.protocol == IPPROTO_UDP) {
		struct udphdr *udp = at->pos;

		if (!has(at, sizeof(*udp)) || bpf_ntohs(udp->len) < sizeof(*udp) ||
		    (is_whole && bpf_ntohs(udp->len) > at->left))
			return PARSE_TRANSPORT;
		read_ports(pkt, udp);
		return PARSE_OK;
	}
	return PARSE_OTHER_PROTOCOL;
}

/* Parses the IPv4 header. `fragment` is as in parse_network. */
static __always_inline enum parse_result parse_ipv4(struct cursor *at, struct packet *pkt,
						    struct fragment *fragment)
{
	struct iphdr *ip = at->pos;

	if ((void *)(ip + 1) > at->end)
		return PARSE_IP_HEADER;
	map_ipv4(&pkt->key.source, ip->saddr);
	map_ipv4(&pkt->key.destination, ip->daddr);
	pkt->ethertype = bpf_htons(ETH_P_IP);
	pkt->length = bpf_ntohs(ip->tot_len);
	pkt->version_class = *(const __be16 *)ip;
	pkt->hop_limit = ip->ttl;
	set_protocol(pkt, ip->protocol);
	if (ip->version != 4 || ip->ihl < 5 || pkt->length < ip->ihl * 4 || !limit(at, pkt->length))
		return PARSE_IP_HEADER;
	if (ip->frag_off & bpf_htons(IP_FLAG_MF | IP_OFFSET_MASK)) {
		if (!fragment)
			return PARSE_FRAGMENT;
		fragment->identification = ip->id;
		fragment->is_later = ip->frag_off & bpf_htons(IP_OFFSET_MASK);
	}
	skip(at, ip->ihl * 4);
	return PARSE_OK;
}

/* Extension headers that may be in front of a readable transport header. */
static __always_inline bool is_extension(__u8 next_header)
{
	if (next_header == IPPROTO_TCP) /* the most frequent one */
		return false;
	return next_header == IPPROTO_HOPOPTS || next_header == IPPROTO_ROUTING ||
	       next_header == IPPROTO_DSTOPTS || next_header == IPPROTO_FRAGMENT;
}

/*
 * Offset of a parsed packet's transport header in the frame, in bytes. It is computed from fields
 * that are kept anyway. So it costs nothing for packets whose transport header is read only once.
 */
static __always_inline __u32 transport_offset(const struct packet *pkt)
{
	if (pkt->transport)
		return pkt->transport;
	if (pkt->ethertype == bpf_htons(ETH_P_IPV6))
		return ETH_HLEN + sizeof(struct ipv6hdr);
	return ETH_HLEN + (bpf_ntohs(pkt->version_class) >> 8 & 0xf) * 4;
}

/* Moves the cursor to a header of the packet, by the header's offset in the frame. */
static __always_inline void move_to_offset(struct cursor *at, const struct xdp_md *ctx,
					   const struct packet *pkt, __u32 offset)
{
	/* The mask is for the verifier: eight extension headers are shorter. */
	at->pos = frame_start(ctx) + (offset & 0x7fff);
	at->end = frame_end(ctx);
	at->left = pkt->length + ETH_HLEN - offset;
}

/* Moves the cursor to the transport header of a parsed packet. */
static __always_inline void move_to(struct cursor *at, const struct xdp_md *ctx,
				    const struct packet *pkt)
{
	move_to_offset(at, ctx, pkt, transport_offset(pkt));
}

/*
 * Walks the extension headers to the transport header, or to the data of a later fragment.
 * `pkt->transport` is at first the offset of the first extension header, and afterwards that of the
 * transport header. An atomic fragment (offset 0, no more fragments) is a whole packet (RFC 6946).
 * Not inlined: few packets have extension headers, and the path of all others stays short.
 *
 * The offset stays in `pkt`, whose content the verifier does not follow. So the verifier sees the
 * same state after each header, whatever the header was. With the offset in a register, it would
 * follow each combination of headers.
 */
__noinline int parse_extensions(struct xdp_md *ctx, struct packet *pkt, struct fragment *fragment)
{
	struct cursor at;
	__u8 next;

	if (!pkt)
		return PARSE_EXTENSION;
	next = pkt->key.protocol;
	for (int i = 0; i <= MAX_EXTENSION_HEADERS; i++) {
		struct extension_header *header;
		__u32 size;

		if (!is_extension(next)) {
			set_protocol(pkt, next);
			return PARSE_OK;
		}
		move_to_offset(&at, ctx, pkt, pkt->transport);
		header = at.pos;
		if (!has(&at, sizeof(struct fragment_header)))
			return PARSE_EXTENSION;
		size = (header->length + 1) * 8;
		if (next == IPPROTO_FRAGMENT) {
			struct fragment_header *piece = at.pos;

			if (piece->offset & bpf_htons(IP6_FRAGMENT_OFFSET_OR_MORE)) {
				if (!fragment)
					return PARSE_FRAGMENT;
				fragment->identification = piece->identification;
				fragment->is_later = piece->offset & bpf_htons(IP6_FRAGMENT_OFFSET);
				if (fragment->is_later)
					return PARSE_OK;
			}
			size = sizeof(*piece);
		} else if (next == IPPROTO_HOPOPTS) {
			if (i > 0) /* RFC 8200 section 4.1: only right behind the IPv6 header */
				return PARSE_EXTENSION;
			pkt->hop_by_hop = size;
		} else if (next == IPPROTO_ROUTING && header->segments_left > 0) {
			return PARSE_SEGMENTS_LEFT;
		}
		if (size > at.left)
			return PARSE_EXTENSION;
		next = header->next_header;
		pkt->transport += size;
	}
	return PARSE_EXTENSION;
}

/* Parses the IPv6 header, up to the first extension header. */
static __always_inline enum parse_result parse_ipv6(struct cursor *at, struct packet *pkt)
{
	struct ipv6hdr *ip = at->pos;

	if ((void *)(ip + 1) > at->end)
		return PARSE_IP_HEADER;
	copy_address(&pkt->key.source, &ip->saddr);
	copy_address(&pkt->key.destination, &ip->daddr);
	pkt->ethertype = bpf_htons(ETH_P_IPV6);
	pkt->length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	pkt->version_class = *(const __be16 *)ip;
	pkt->hop_limit = ip->hop_limit;
	set_protocol(pkt, ip->nexthdr);
	/* A length above 65,535 wraps around to less than the size of the header. */
	if (ip->version != 6 || is_ipv4(&ip->daddr) || pkt->length < sizeof(*ip) ||
	    !limit(at, pkt->length))
		return PARSE_IP_HEADER;
	skip(at, sizeof(*ip));
	return PARSE_OK;
}

/* The EtherType field, as a pointer to both bytes. Through the packed struct, the compiler would
 * access each byte by itself. */
static __always_inline __be16 *ethertype_of(struct ethhdr *ethernet)
{
	return (void *)ethernet + offsetof(struct ethhdr, h_proto);
}

/* Parses Ethernet and network headers, extension headers included. `fragment` must be zero, or
 * NULL. If it is NULL, the result for a fragment is PARSE_FRAGMENT. */
static __always_inline enum parse_result
parse_network(struct xdp_md *ctx, struct cursor *at, struct packet *pkt, struct fragment *fragment)
{
	struct ethhdr *ethernet = frame_start(ctx);
	enum parse_result result;
	__be16 ethertype;

	at->end = frame_end(ctx);
	if ((void *)(ethernet + 1) > at->end)
		return PARSE_NOT_IP;
	at->pos = ethernet + 1;
	ethertype = *ethertype_of(ethernet);
	if (ethertype == bpf_htons(ETH_P_IP))
		result = parse_ipv4(at, pkt, fragment);
	else if (ethertype == bpf_htons(ETH_P_IPV6))
		result = parse_ipv6(at, pkt);
	else
		return PARSE_NOT_IP;
	if (result)
		return result;
	if (pkt->ethertype == bpf_htons(ETH_P_IPV6) && is_extension(pkt->key.protocol)) {
		pkt->transport = at->pos - frame_start(ctx);
		result = parse_extensions(ctx, pkt, fragment);
		if (result)
			return result;
		move_to(at, ctx, pkt);
	}
	return PARSE_OK;
}

/* Parses a whole packet, transport header included. `pkt` must be zero. */
static __always_inline enum parse_result parse(struct xdp_md *ctx, struct packet *pkt)
{
	struct cursor at = {};
	enum parse_result result = parse_network(ctx, &at, pkt, NULL);

	if (!result)
		result = parse_transport(&at, pkt, true);
	return result;
}

#endif
