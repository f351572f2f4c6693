/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reads a server's signal, and takes it off the packet that carries it to the balancer and is meant
 * for the client. There are two formats (docs/understand/protocol.md):
 *
 *	srv6-insert	VIP -> balancer's SID, routing header (server, balancer's SID,
 *			client) with one segment left, TCP
 *	srv6-encap	server -> balancer's SID, the packet
 */
#ifndef SEGUE_BALANCER_PATH_UNWRAP_H
#define SEGUE_BALANCER_PATH_UNWRAP_H

#include "net/ecn.h"
#include "balancer/path/encap.h"
#include "net/host.h"
#include "net/inner.h"
#include "net/parse.h"
#include "net/srv6.h"

/* The node's locator, in memory order, replaced by one store; 0: the node has none. */
volatile __u64 node_locator;

/* Segments of a signal's routing header, in memory order. */
enum signal_segment {
	SIGNAL_CLIENT,
	SIGNAL_BALANCER,
	SIGNAL_SENDER,
	SIGNAL_SEGMENTS,
};

struct signal {
	__u64 sender;	     /* the server's locator, in memory order */
	__u64 report;	     /* low 64 bits of the server's segment */
	__u64 sid_low;	     /* low 64 bits of the destination SID: function and argument */
	__be32 acknowledged; /* sequence number that the server expects next */
	__u16 size;	     /* bytes of all headers around the packet for the client */
	__s8 ecn;	     /* ECN field that the inner packet must get; -1: drop the packet */
	__u8 inner_ecn;	     /* ECN field that the inner packet has */
};

/* Whether a packet is for the balancer itself: a server's signal, a packet that a server returns,
 * or a server's answer to a probe. It is to this balancer's SID, and has segments left or a packet
 * inside. */
static __always_inline bool is_to_balancer(const struct packet *pkt, enum parse_result result)
{
	const struct in6_addr *to = &pkt->key.destination;
	enum sid_function function = sid_function(to);
	__u64 locator = *(const __u64 *)to;

	if (pkt->ethertype != bpf_htons(ETH_P_IPV6) || locator != node_locator || !locator)
		return false;
	if (result != PARSE_SEGMENTS_LEFT && result != PARSE_OTHER_PROTOCOL)
		return false;
	return function == SID_CREATE || function == SID_REMOVE || function == SID_RETURN ||
	       function == SID_PROBE;
}

/* Sets the addresses of the flow's key, whose source is the client. */
static __always_inline void set_flow_key(struct packet *pkt, const struct in6_addr *client,
					 const struct in6_addr *vip)
{
	pkt->key.source = *client;
	pkt->key.destination = *vip;
}

/* Combines the ECN fields of both headers (net/ecn.h). `pkt` has the outer traffic class. */
static __always_inline void read_ecn(const struct packet *pkt, struct signal *signal, __u8 inner)
{
	signal->inner_ecn = inner & ECN_MASK;
	signal->ecn = combine_ecn(inner, traffic_class(pkt));
}

/* Reads an inserted signal. False: it is malformed. The balancer's segment in the list is not
 * compared, because it is the packet's destination. */
static __always_inline bool read_inserted_signal(struct cursor *at, struct packet *pkt,
						 struct signal *signal)
{
	const struct segment_routing_header *srh = at->pos;
	struct in6_addr vip = pkt->key.source;

	if (!has(at, srh_size(SIGNAL_SEGMENTS)) || srh->type != ROUTING_TYPE_SRH ||
	    srh->length != SIGNAL_SEGMENTS * 2 || srh->last_entry != SIGNAL_SEGMENTS - 1 ||
	    srh->segments_left != SIGNAL_BALANCER)
		return false;
	set_flow_key(pkt, &srh->segment[SIGNAL_CLIENT], &vip);
	set_protocol(pkt, srh->next_header);
	signal->sender = *(const __u64 *)&srh->segment[SIGNAL_SENDER];
	signal->report = low_bits_of(&srh->segment[SIGNAL_SENDER]);
	signal->size = srh_size(SIGNAL_SEGMENTS);
	skip(at, srh_size(SIGNAL_SEGMENTS));
	return !is_ipv4(&pkt->key.source) && !is_ipv4(&vip);
}

/* Reads a signal around the server's packet to the client. Inner IPv6 addresses must not have the
 * IPv4-mapped form, which means IPv4 in the tables. False: it is malformed. */
static __always_inline bool read_wrapped_signal(struct cursor *at, struct packet *pkt,
						struct signal *signal, __be16 ethertype)
{
	struct inner_header inner;

	if (!read_inner_header(at, ethertype, &inner) || !inner_fits(&inner, at->left) ||
	    inner.length != at->left || inner.is_fragment)
		return false;
	if (ethertype == bpf_htons(ETH_P_IPV6) &&
	    (is_ipv4(&inner.source) || is_ipv4(&inner.destination)))
		return false;
	read_ecn(pkt, signal, inner.traffic_class);
	set_flow_key(pkt, &inner.destination, &inner.source);
	set_protocol(pkt, inner.protocol);
	pkt->ethertype = inner.ethertype;
	pkt->hop_limit = inner.hop_limit;
	skip(at, inner.size);
	return true;
}

/*
 * Reads a signal, whose outer header is parsed, up to the TCP header. `pkt` then has the key of the
 * client's flow, and the TCP flags of the server's packet. False when the format is wrong. Not
 * inlined: see handle_in_full.
 */
__noinline int read_signal(struct xdp_md *ctx, struct packet *pkt, struct signal *signal)
{
	struct cursor at = { .pos = frame_start(ctx), .end = frame_end(ctx) };
	const struct ipv6hdr *ip = at.pos + ETH_HLEN;
	const struct tcphdr *tcp;
	bool is_read = false;

	if (!pkt || !signal || (void *)(ip + 1) > at.end)
		return false;
	at.pos = (void *)(ip + 1);
	at.left = pkt->length - sizeof(*ip);
	signal->sid_low = low_bits_of(&pkt->key.destination);
	if (ip->nexthdr == IPPROTO_ROUTING) {
		is_read = read_inserted_signal(&at, pkt, signal);
	} else {
		signal->sender = *(const __u64 *)&pkt->key.source;
		signal->report = low_bits_of(&pkt->key.source);
		signal->size = sizeof(*ip);
		if (ip->nexthdr == IPPROTO_IPIP || ip->nexthdr == IPPROTO_IPV6)
			is_read =
				read_wrapped_signal(&at, pkt, signal, inner_ethertype(ip->nexthdr));
	}
	tcp = at.pos;
	if (!is_read || signal->ecn < 0 || pkt->key.protocol != IPPROTO_TCP ||
	    !has(&at, sizeof(*tcp)))
		return false;
	pkt->key.source_port = tcp->dest;
	pkt->key.destination_port = tcp->source;
	pkt->tcp_flags = ((const __u8 *)tcp)[13];
	signal->acknowledged = tcp->ack_seq;
	return true;
}

/* Removes the routing header: moves the headers in front of it over its end. */
static __always_inline bool remove_srh(struct xdp_md *ctx, const struct packet *pkt)
{
	const __u32 size = srh_size(SIGNAL_SEGMENTS);
	struct ethhdr *ethernet = frame_start(ctx) + size;
	struct ipv6hdr *ip = (void *)(ethernet + 1);

	if ((void *)(ip + 1) > frame_end(ctx))
		return false;
	__builtin_memcpy(ethernet, frame_start(ctx), sizeof(*ethernet) + sizeof(*ip));
	ip->payload_len = bpf_htons(pkt->length - sizeof(*ip) - size);
	ip->nexthdr = IPPROTO_TCP;
	copy_address(&ip->daddr, &pkt->key.source);
	return true;
}

/* Writes the ECN field of the packet in the frame. False: the frame is too short. */
static __always_inline bool mark_congestion(struct xdp_md *ctx, const struct packet *pkt, __u8 ecn)
{
	void *layer3 = frame_start(ctx) + ETH_HLEN;

	if (layer3 + sizeof(struct ipv6hdr) > frame_end(ctx))
		return false;
	if (pkt->ethertype == bpf_htons(ETH_P_IP))
		set_ipv4_ecn(layer3, ecn);
	else
		set_ipv6_ecn(layer3, ecn);
	return true;
}

/* Leaves only the packet to the client in the frame, and decrements its hop limit. */
static __always_inline bool remove_signal(struct xdp_md *ctx, const struct packet *pkt,
					  const struct signal *signal)
{
	struct ethhdr *ethernet;

	/* An inserted signal has another size: a routing header, and no outer IPv6 header. */
	if (signal->size != sizeof(struct ipv6hdr) && !remove_srh(ctx, pkt))
		return false;
	if (bpf_xdp_adjust_head(ctx, signal->size))
		return false;
	ethernet = frame_start(ctx);
	if ((void *)(ethernet + 1) > frame_end(ctx))
		return false;
	mark_own(ethernet);
	*ethertype_of(ethernet) = pkt->ethertype;
	if (signal->ecn != signal->inner_ecn && !mark_congestion(ctx, pkt, signal->ecn))
		return false;
	return take_hop(ctx, pkt);
}

#endif
