/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ICMP to a VIP. An error about a server's packet quotes that packet. The quote names the flow, and
 * so the server that has to learn of the error (RFC 792, RFC 4443 section 2.4).
 */
#ifndef SEGUE_BALANCER_PATH_ICMP_H
#define SEGUE_BALANCER_PATH_ICMP_H

#include "balancer/path/answer.h"
#include "net/parse.h"
#include "net/quote.h"
#include "balancer/stats.h"

static __always_inline bool is_icmp(const struct packet *pkt)
{
	return pkt->key.protocol ==
	       (pkt->ethertype == bpf_htons(ETH_P_IP) ? IPPROTO_ICMP : IPPROTO_ICMPV6);
}

/* Whether a message is an error about a packet of a flow. Source quench is obsolete (RFC 6633), and
 * redirects are for the sender's host alone (RFC 1122 section 3.3.1.2). */
static __always_inline bool is_icmp_error(const struct packet *pkt, __u8 type)
{
	if (pkt->ethertype == bpf_htons(ETH_P_IP))
		return type == ICMPV4_UNREACHABLE || type == ICMPV4_TIME_EXCEEDED ||
		       type == ICMPV4_PARAMETER_PROBLEM;
	return type >= ICMPV6_UNREACHABLE && type <= ICMPV6_PARAMETER_PROBLEM;
}

/* Whether a host of the link asks for the VIP's MAC address. The hop limit shows that no router has
 * forwarded the message (RFC 4861 section 7.1.1). */
static __always_inline bool is_solicitation(const struct packet *pkt, __u8 type)
{
	return pkt->ethertype == bpf_htons(ETH_P_IPV6) && type == ICMPV6_NEIGHBOUR_SOLICITATION &&
	       pkt->hop_limit == 255;
}

/*
 * Reads an ICMP message to a VIP. Its network header is parsed. The reason is none if the message
 * is for a flow's server. Not inlined: the verifier walks it once, and only ICMP takes this path.
 */
__noinline int read_icmp(struct xdp_md *ctx, struct packet *pkt)
{
	const struct icmp_header *icmp;
	struct cursor at;

	if (!pkt)
		return LB_DROP_TRANSPORT;
	move_to(&at, ctx, pkt);
	icmp = at.pos;
	if (!has(&at, sizeof(*icmp)))
		return LB_DROP_TRANSPORT;
	if (is_echo_request(pkt, icmp))
		return answer_echo(ctx, pkt);
	if (is_solicitation(pkt, icmp->type))
		return LB_PASS_SOLICITATION;
	if (!is_icmp_error(pkt, icmp->type))
		return LB_DROP_ICMP_TYPE;
	skip(&at, sizeof(*icmp));
	return read_quote(ctx, &at, pkt) ? LB_NONE : LB_DROP_ICMP_QUOTE;
}

#endif
