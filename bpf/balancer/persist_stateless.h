/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Persistence `stateless`: the balancer keeps nothing about flows. The server that takes a flow writes
 * its column into the low bits of the TCP timestamps that it sends, and the client echoes them. So a
 * packet tells which column of its bucket's row has its server, now or formerly.
 *
 * Pit-Claudel et al., "Stateless Load-Aware Load Balancing in P4", 2018 (SHELL), sections II and III.
 */
#ifndef SEGUE_BALANCER_PERSIST_STATELESS_H
#define SEGUE_BALANCER_PERSIST_STATELESS_H

#include "columns.h"
#include "net/timestamp.h"
#include "persist_table.h"

/* Whether the flow table may have flows of the service. */
static __always_inline bool has_flows(const struct service *service)
{
	return persistence_of(service) == PERSISTENCE_TABLE ||
	       service->rule.flags & RULE_FORMER_FLOWS;
}

/* The column in the packet's cookie; negative: the packet has no cookie. A row of one column needs
 * none. An echo is valid only if the packet has the ACK flag (RFC 7323 section 3.2), and 0 is no
 * echo, as Linux understands it. */
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
	return column < candidates_of(service) ? (int)column : -1;
}

/* Finds the server of a plain packet whose column never had another server. False: handle_in_full()
 * handles the packet. */
static __always_inline bool lookup_stateless_plain(struct xdp_md *ctx, const struct packet *pkt,
						   const struct service *service, struct flow *flow,
						   struct segments *segments)
{
	const struct server *server;
	__u32 number;
	int column;

	if (has_flows(service))
		return false;
	column = cookie_of(ctx, pkt, service);
	if (column < 0)
		return false;
	number = only_server_of(service, bucket_of(&pkt->key, service->rule.buckets), column);
	server = server_at(number);
	if (!serves(server, service))
		return false;
	flow_assume(flow, &pkt->key, number);
	go_to(segments, number, server);
	return true;
}

/* Lists the servers that may have the flow of a packet: those of its column, and those of all columns if
 * it has no cookie, or may be older than cookies. Some stacks send resets without options. If the
 * column has no server any more, another one resets the connection. Not inlined: see
 * handle_in_full. */
__noinline int list_for_cookie(struct xdp_md *ctx, const struct packet *pkt,
			       const struct service *service, struct segments *segments)
{
	__u32 bucket;
	int column;

	if (!pkt || !service || !segments)
		return 0;
	bucket = bucket_of(&pkt->key, service->rule.buckets);
	column = cookie_of(ctx, pkt, service);
	segments->count = 0;
	segments->columns = 0;
	list_column(service, bucket, column < 0 ? 0 : column, segments);
	if (column < 0 || !segments->count || service->rule.flags & RULE_FORMER_FLOWS) {
		list_row(service, generations_of(service), bucket, LIST_REACHABLE, segments);
		list_row(service, 1, bucket, LIST_ANY, segments);
	}
	return 0;
}

/* Notes whether a SYN offers timestamps. Not inlined: see handle_in_full. */
__noinline int note_timestamps(struct xdp_md *ctx, struct packet *pkt)
{
	if (pkt)
		pkt->has_timestamps = find_timestamps(ctx, transport_offset(pkt)) != NULL;
	return 0;
}

/* Finds the servers of a flow by the packet. The reason is none for SYNs, which are placed. */
static __always_inline enum lb_reason lookup_stateless(struct xdp_md *ctx, struct packet *pkt,
						       const struct service *service,
						       struct segments *segments)
{
	if (starts_connection(pkt)) {
		note_timestamps(ctx, pkt);
		return LB_NONE;
	}
	list_for_cookie(ctx, pkt, service, segments);
	if (!ask_listed(segments, SID_STEER, SID_STEER))
		return LB_DROP_NO_SERVER;
	ask_for_cookies(service, segments);
	return segments->count == 1 ? LB_FORWARD_KNOWN : LB_FORWARD_RECOVER;
}

/* Finds the server of a flow from before, for a fragment or an ICMP error. */
static __always_inline bool recall_former(const struct packet *pkt, const struct service *service,
					  struct flow *flow, struct segments *segments)
{
	if (service->rule.flags & RULE_FORMER_FLOWS)
		return recall_table(pkt, service, flow, segments);
	flow_sign(flow, &pkt->key);
	return false;
}

/* Removes the entry of a flow that was placed anew, unless the entry's server is asked first. */
static __always_inline void forget_unless_asked(const struct flow *flow,
						const struct segments *segments)
{
	if (flow_known(flow) && flow_server(flow) != segments->server[0])
		flow_transition(flow, flow->value, 0);
}

/* Forgets a flow from before that was placed anew. Its entry would lead later packets to a server
 * that does not have the new connection, and no server's answer would mend the entry. */
static __always_inline void forget_former(const struct service *service, const struct flow *flow,
					  const struct segments *segments)
{
	struct flow half_open_flow = {};

	if (!(service->rule.flags & RULE_FORMER_FLOWS))
		return;
	forget_unless_asked(flow, segments);
	if (!(service->rule.flags & RULE_HALF_OPEN))
		return;
	half_open_lookup(flow, &half_open_flow);
	forget_unless_asked(&half_open_flow, segments);
}

/* Takes note of a signal about a flow from before. */
static __always_inline enum lb_reason take_signal_stateless(const struct packet *pkt,
							    const struct service *service,
							    struct flow *flow, __u32 sender,
							    bool removes)
{
	if (!removes)
		return LB_RETURN_CREATE;
	return has_flows(service) ? take_remove_table(pkt, service, flow, sender)
				  : LB_RETURN_REMOVE;
}

#endif
