/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What an ICMP error quotes of the packet that it is about.
 */
#ifndef SEGUE_NET_QUOTE_H
#define SEGUE_NET_QUOTE_H

#include "parse.h"

/* Of the transport header, what every quote has of it (RFC 792): more than ports. */
#define QUOTED_TRANSPORT 8

/* Reads the addresses and the protocol of a packet of which there is only the
 * beginning, up to its transport header. Its lengths are not looked at. */
static __always_inline bool read_quoted_ipv4(struct cursor *at, struct packet *pkt)
{
	const struct iphdr *ip = at->pos;

	if (!has(at, sizeof(*ip)) || ip->version != 4 || ip->ihl < 5 || ip->ihl * 4 > at->left ||
	    ip->frag_off & bpf_htons(IP_OFFSET_MASK))
		return false;
	map_ipv4(&pkt->key.source, ip->saddr);
	map_ipv4(&pkt->key.destination, ip->daddr);
	set_protocol(pkt, ip->protocol);
	skip(at, ip->ihl * 4);
	return true;
}

static __always_inline bool read_quoted_ipv6(struct xdp_md *ctx, struct cursor *at,
					     struct packet *pkt)
{
	const struct ipv6hdr *ip = at->pos;
	__u16 hop_by_hop = pkt->hop_by_hop;
	struct fragment fragment = {};

	if (!has(at, sizeof(*ip)) || ip->version != 6)
		return false;
	pkt->key.source = ip->saddr;
	pkt->key.destination = ip->daddr;
	set_protocol(pkt, ip->nexthdr);
	skip(at, sizeof(*ip));
	pkt->transport = at->pos - frame_start(ctx);
	if (parse_extensions(ctx, pkt, &fragment) || fragment.is_later)
		return false;
	pkt->hop_by_hop = hop_by_hop; /* not the quoted packet's */
	move_to(at, ctx, pkt);
	return true;
}

/* Makes the packet one of the flow that is quoted: what the server has sent, seen
 * from the client. False when it is not a VIP's that was asked for. Read in place, for
 * there is no room for another packet on the stack (512 bytes for all functions). */
static __always_inline bool read_quote(struct xdp_md *ctx, struct cursor *at, struct packet *pkt)
{
	bool is_v4 = pkt->ethertype == bpf_htons(ETH_P_IP);
	const struct in6_addr vip = pkt->key.destination;
	const __be16 *ports;

	if (!(is_v4 ? read_quoted_ipv4(at, pkt) : read_quoted_ipv6(ctx, at, pkt)))
		return false;
	if (pkt->key.protocol != IPPROTO_TCP && pkt->key.protocol != IPPROTO_UDP)
		return false;
	ports = at->pos;
	if (!has(at, QUOTED_TRANSPORT) || !same_address(&pkt->key.source, &vip))
		return false;
	copy_address(&pkt->key.source, &pkt->key.destination);
	copy_address(&pkt->key.destination, &vip);
	pkt->key.source_port = ports[1];
	pkt->key.destination_port = ports[0];
	pkt->kind = PACKET_ICMP_ERROR;
	return true;
}

#endif
