/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP to a VIP. Errors about what a server has sent to a client quote it, and
 * with it the flow whose server is to learn of them (RFC 792, RFC 4443 section 2.4).
 */
#ifndef SEGUE_ICMP_H
#define SEGUE_ICMP_H

#include "answer.h"
#include "parse.h"
#include "stats.h"

/* Of the transport header, what every quote has of it (RFC 792): more than ports. */
#define QUOTED_TRANSPORT 8

static __always_inline bool is_icmp(const struct packet *pkt)
{
	return pkt->key.protocol ==
	       (pkt->ethertype == bpf_htons(ETH_P_IP) ? IPPROTO_ICMP : IPPROTO_ICMPV6);
}

/* Errors about a packet. Source quench and redirects are not for the ends of a
 * flow: RFC 6633, RFC 1122 section 3.3.1.2. */
static __always_inline bool is_icmp_error(const struct packet *pkt, __u8 type)
{
	if (pkt->ethertype == bpf_htons(ETH_P_IP))
		return type == ICMPV4_UNREACHABLE || type == ICMPV4_TIME_EXCEEDED ||
		       type == ICMPV4_PARAMETER_PROBLEM;
	return type >= ICMPV6_UNREACHABLE && type <= ICMPV6_PARAMETER_PROBLEM;
}

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

/*
 * Reads an ICMP message to a VIP, whose network header is parsed; the reason is
 * none if it is for a flow's server. Not inlined: the verifier walks it once, and
 * packets of flows do not come by.
 */
__noinline int read_icmp(struct xdp_md *ctx, struct packet *pkt)
{
	const struct icmp_header *icmp;
	struct cursor at;

	if (!pkt)
		return REASON_DROP_TRANSPORT;
	move_to(&at, ctx, pkt);
	icmp = at.pos;
	if (!has(&at, sizeof(*icmp)))
		return REASON_DROP_TRANSPORT;
	if (is_echo_request(pkt, icmp))
		return answer_echo(ctx, pkt);
	if (!is_icmp_error(pkt, icmp->type))
		return REASON_DROP_ICMP_TYPE;
	skip(&at, sizeof(*icmp));
	return read_quote(ctx, &at, pkt) ? REASON_NONE : REASON_DROP_ICMP_QUOTE;
}

#endif
