/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The timestamp cookie of a flow: the column of the server that has the flow, in the low bits of
 * the TCP timestamps that the client echoes (SHELL, section III).
 */
#ifndef SEGUE_BALANCER_PERSIST_COOKIE_H
#define SEGUE_BALANCER_PERSIST_COOKIE_H

#include "net/timestamp.h"
#include "balancer/tables/candidates.h"
#include "balancer/decision.h"

/* The width of a cookie in bits: enough to tell all columns of a row apart, but at least 1. With a
 * width of 0, servers would send signals, and write no cookies. */
static __always_inline __u32 cookie_width(const struct service *service)
{
	__u32 candidates = candidates_of(service);

	return 1 + (candidates > 2) + (candidates > 4);
}

/* The column in the packet's cookie; negative: the packet has no cookie. If rows have one column,
 * it is 0, and no cookie is needed. An echo is valid only if the packet has the ACK flag (RFC 7323
 * section 3.2), and 0 is no echo, as Linux understands it. */
static __always_inline int cookie_of(struct xdp_md *ctx, const struct packet *pkt,
				     const struct service *service)
{
	const struct timestamps *timestamps;
	__u32 column;

	if (candidates_of(service) <= 1)
		return 0;
	if (!(pkt->tcp_flags & TCP_ACK))
		return -1;
	timestamps = find_timestamps(ctx, transport_offset(pkt));
	if (!timestamps || !timestamps->echo)
		return -1;
	column = bpf_ntohl(timestamps->echo) & cookie_mask(cookie_width(service));
	if (column >= candidates_of(service))
		return -1;
	note_cookie(column);
	return column;
}

/* The column in the packet's cookie; negative: the packet has no cookie. A SYN never has one: the
 * result tells whether it has timestamps, which later carry the cookie (0), or not (negative). Not
 * inlined: see handle_in_full. */
__noinline int read_cookie(struct xdp_md *ctx, const struct packet *pkt,
			   const struct service *service)
{
	if (!pkt || !service)
		return -1;
	if (starts_connection(pkt) && candidates_of(service) > 1)
		return find_timestamps(ctx, transport_offset(pkt)) ? 0 : -1;
	return cookie_of(ctx, pkt, service);
}

#endif
