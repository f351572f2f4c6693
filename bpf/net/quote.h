/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reads the packet that an ICMP error quotes.
 */
#ifndef SEGUE_NET_QUOTE_H
#define SEGUE_NET_QUOTE_H

#include "parse.h"

/* Bytes of the transport header that every quote includes (RFC 792): the ports, and four more. */
#define QUOTED_TRANSPORT 8

/* Reads addresses and protocol of a quoted packet, and moves the cursor to its transport header.
 * The packet's length is not checked, because only its beginning is quoted. False: the header is
 * malformed or cut off, or the packet is a later fragment. */
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

/* Reads a quoted IPv6 packet, as read_quoted_ipv4 does. Extension headers are skipped. */
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
	pkt->hop_by_hop = hop_by_hop; /* that of the error, not of the quoted packet */
	move_to(at, ctx, pkt);
	return true;
}

/* Gives an ICMP error the key of the quoted flow. A server has sent the quoted packet. The key is
 * that of the client's packets, so source and destination change places. False: the source of the
 * quoted packet is not the VIP that the error was sent to, or the quote cannot be read. `pkt` is
 * changed in place, because the stack has no room for a second packet (512 bytes for all
 * functions). */
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
