/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Persistence `stateless`: the balancer keeps nothing about flows. The server that takes a flow
 * writes its column into the low bits of the TCP timestamps that it sends, and the client echoes
 * them. So a packet names a column of its bucket's row, and its server is in that column, now or in
 * a former generation.
 *
 * Pit-Claudel et al., "Stateless Load-Aware Load Balancing in P4", 2018 (SHELL), sections II and
 * III.
 */
#ifndef SEGUE_BALANCER_PERSIST_STATELESS_H
#define SEGUE_BALANCER_PERSIST_STATELESS_H

#include "balancer/persist/cookie.h"
#include "balancer/persist/hint.h"

/* Finds the server of a plain packet whose column never had another server. False: handle_in_full()
 * handles the packet. */
static __always_inline bool lookup_stateless_plain(struct xdp_md *ctx, const struct packet *pkt,
						   const struct service *service, struct flow *flow,
						   struct segments *segments)
{
	int column = cookie_of(ctx, pkt, service);
	const struct server *server;
	__u32 number;

	if (column < 0)
		return has_hints() && lookup_hint_plain(pkt, service, flow, segments);
	number = only_server_of(service, bucket_of(&pkt->key, service), column);
	server = server_at(number);
	if (!serves(server, service))
		return false;
	flow_assume(flow, &pkt->key, number);
	go_to(segments, number, server);
	return true;
}

/*
 * Whether a packet visits the servers of its whole row, after those of its column. It does if it
 * has no cookie, if the column has no server any more, if a server has returned the packet, or if
 * the flow may be older than cookies.
 *
 * With hints, it also does if the column has several servers, because the packet's cookie may be
 * wrong. The flow may be from before a change from persistence `hint`: then the timestamps in its
 * packets name any column. Or the flow's server may have learnt a wrong column. The only server of
 * a list returns a packet that it does not know, and the packet then visits the whole row. Nobody
 * returns a packet that has a list of several servers, so this list must have the whole row at
 * once.
 *
 * That costs 16 bytes for each server, but only in columns that have changed. The hint table would
 * name the server in fewer bytes, but it forgets flows that are idle for a minute.
 */
static __always_inline bool visits_row(const struct packet *pkt, const struct service *service,
				       int column, const struct segments *segments)
{
	return column < 0 || !segments->count || pkt->visits_all || has_former_flows(service) ||
	       (segments->count > 1 && has_hints());
}

/*
 * Lists the servers that may have the flow of a packet: those of its column first. The servers of
 * the other columns follow if the packet visits its whole row. As in list_possible, servers that
 * fail come behind all others, and servers that cannot be reached come last. Not inlined: see
 * handle_in_full.
 */
__noinline int list_for_cookie(const struct packet *pkt, const struct service *service, int column,
			       struct segments *segments)
{
	__u32 bucket, fit, first = column < 0 ? 0 : column;

	if (!pkt || !service || !segments)
		return 0;
	bucket = bucket_of(&pkt->key, service);
	segments->count = 0;
	segments->columns = 0;
	list_column(service, bucket, first, LIST_FIT, segments);
	fit = segments->count;
	list_column(service, bucket, first, LIST_REACHABLE, segments);
	list_column(service, bucket, first, LIST_ANY, segments);
	if (!visits_row(pkt, service, column, segments))
		return 0;
	segments->count = fit; /* the other servers of the column follow those of the row */
	list_row(service, generations_of(service), bucket, LIST_FIT, segments);
	list_column(service, bucket, first, LIST_REACHABLE, segments);
	list_row(service, generations_of(service), bucket, LIST_REACHABLE, segments);
	list_column(service, bucket, first, LIST_ANY, segments);
	list_row(service, 1, bucket, LIST_ANY, segments);
	return 0;
}

/* Sends a packet through the servers that may have its flow. */
static __always_inline enum lb_reason follow_cookie(const struct packet *pkt,
						    const struct service *service, int column,
						    struct segments *segments)
{
	list_for_cookie(pkt, service, column, segments);
	if (!ask_listed(segments, SID_STEER, SID_STEER))
		return LB_DROP_NO_SERVER;
	ask_for_cookie(cookie_width(service), segments);
	if (segments->count > 1 || pkt->visits_all)
		return LB_FORWARD_RECOVER;
	if (has_hints())
		segments->first_sid |= (__u32)bpf_cpu_to_be64(LOAD_RETURN);
	return LB_FORWARD_KNOWN;
}

/* Notes how later packets of a new flow will find their server. If the SYN has no timestamps, as
 * those of Windows, a hint will name the server. Without hints, only the first candidate may take
 * the flow. */
static __always_inline void note_syn(struct packet *pkt, const struct service *service, int column)
{
	bool has_timestamps = column >= 0;

	if (has_timestamps || !has_hints())
		pkt->cookie_width = cookie_width(service);
	pkt->is_single = !has_timestamps && !has_hints();
}

/*
 * Finds the servers of a flow by the packet. The reason is none if placement has to find the
 * servers: for a SYN, and for a packet with neither a cookie nor a hint, such as the resets that
 * some stacks send without options. If the program has no hints, a packet without a cookie visits
 * the servers of the first column, and then those of the others.
 */
static __always_inline enum lb_reason lookup_stateless(struct xdp_md *ctx, struct packet *pkt,
						       const struct service *service, int *holder,
						       struct segments *segments)
{
	int column = read_cookie(ctx, pkt, service);

	if (starts_connection(pkt))
		note_syn(pkt, service, column);
	if (column < 0 && has_hints())
		return lookup_hint(pkt, service, holder, segments);
	return starts_connection(pkt) ? LB_NONE : follow_cookie(pkt, service, column, segments);
}

/* Finds the server of a flow for a fragment or an ICMP error, if the flow has an entry from before
 * a change of persistence. */
static __always_inline bool recall_former(const struct packet *pkt, const struct service *service,
					  struct flow *flow, struct segments *segments)
{
	if (has_former_flows(service))
		return recall_table(pkt, service, flow, segments);
	flow_sign(flow, &pkt->key);
	return false;
}

/* Removes the entry of a flow that was placed anew, unless the entry's server is the one that is
 * asked first (`asked`). In that case, the server that takes the connection answers, and its answer
 * changes the entry (enters_flow). */
static __always_inline void forget_unless_asked(const struct flow *flow, __u32 asked)
{
	if (flow_known(flow) && flow_server(flow) != asked)
		flow_transition(flow, flow->value, 0);
}

/* Removes the entries that a flow has from before a change of persistence, when the flow is placed
 * anew. `asked` is the server that the packet visits first. An entry would lead later packets to a
 * server that does not have the new connection, and no server's answer would mend it. Not inlined:
 * it would use much of the stack. */
__noinline int forget_former(const struct packet *pkt, const struct service *service, __u32 asked)
{
	struct flow flow = {}, half_open_flow = {};

	if (!pkt || !service)
		return 0;
	/* Under any placement, signals may have made the flow half-open. */
	lookup_both(pkt, service, &flow, &half_open_flow);
	forget_unless_asked(&flow, asked);
	forget_unless_asked(&half_open_flow, asked);
	return 0;
}

#endif
