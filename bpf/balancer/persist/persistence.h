/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Persistence: how the packets of a flow that was placed find its server again. Each method has a
 * header of its own, and a line in the functions here.
 */
#ifndef SEGUE_BALANCER_PERSIST_PERSISTENCE_H
#define SEGUE_BALANCER_PERSIST_PERSISTENCE_H

#include "balancer/persist/observed.h"
#include "balancer/persist/quic.h"
#include "balancer/persist/stateless.h"
#include "balancer/persist/table.h"

/*
 * Whether a server could return the packet. A returned packet has the form of a signal, which has
 * no extension headers. If a packet that cannot be returned followed a wrong cookie or hint, the
 * server would reset the connection.
 */
static __always_inline bool can_return(const struct packet *pkt)
{
	return !pkt->transport;
}

/* Finds the server of a flow. The reason is none if the flow has to be placed. `holder` is then the
 * server that may have the flow; negative: there is none. */
static __always_inline enum lb_reason lookup(struct xdp_md *ctx, struct packet *pkt,
					     const struct service *service, struct flow *flow,
					     int *holder, struct segments *segments)
{
	enum lb_reason why;

	/* A packet that no server could return visits all servers that may have its flow, because
	 * its cookie or hint may be wrong. */
	if (!can_return(pkt) && !starts_connection(pkt))
		pkt->visits_all = true;
	if (has_flows(service)) {
		why = lookup_table(pkt, service, flow, holder, segments);
		if (why)
			return why;
	} else {
		flow_sign(flow, &pkt->key);
	}
	if (persists_by(service, PERSISTENCE_STATELESS))
		return lookup_stateless(ctx, pkt, service, holder, segments);
	if (persists_by(service, PERSISTENCE_HINT))
		return lookup_hint(pkt, service, holder, segments);
	if (persists_by(service, PERSISTENCE_QUIC))
		return lookup_quic(ctx, pkt, service, holder, segments);
	return LB_NONE;
}

/* Finds the server of a plain packet. False: handle_in_full() handles the packet. */
static __always_inline bool lookup_plain(struct xdp_md *ctx, const struct packet *pkt,
					 const struct service *service, struct flow *flow,
					 struct segments *segments)
{
	if (has_former_flows(service) || (pkt->tcp_flags & TCP_PSH && is_observed(service)))
		return false;
	switch (persistence_of(service)) {
	case PERSISTENCE_TABLE:
		return has_features(PERSISTENCE_BIT(PERSISTENCE_TABLE)) &&
		       lookup_table_plain(pkt, service, flow, segments);
	case PERSISTENCE_STATELESS:
		return has_features(PERSISTENCE_BIT(PERSISTENCE_STATELESS)) && can_return(pkt) &&
		       lookup_stateless_plain(ctx, pkt, service, flow, segments);
	case PERSISTENCE_HINT:
		return has_features(PERSISTENCE_BIT(PERSISTENCE_HINT)) && can_return(pkt) &&
		       lookup_hint_plain(pkt, service, flow, segments);
	case PERSISTENCE_QUIC:
		return has_features(PERSISTENCE_BIT(PERSISTENCE_QUIC)) &&
		       lookup_quic_plain(ctx, pkt, service, flow, segments);
	}
	return false;
}

/* Finds the server of a flow for a packet that tells nothing about the flow: a fragment, or an
 * ICMP error. */
static __always_inline bool recall_flow(const struct packet *pkt, const struct service *service,
					struct flow *flow, struct segments *segments)
{
	return persists_by(service, PERSISTENCE_TABLE)
		       ? recall_table(pkt, service, flow, segments)
		       : recall_former(pkt, service, flow, segments);
}

/* Stores where a flow was placed. Returns the reason that the packet is counted as. */
static __always_inline enum lb_reason commit(const struct packet *pkt,
					     const struct service *service, struct flow *flow,
					     const struct segments *segments)
{
	if (persists_by(service, PERSISTENCE_TABLE))
		return commit_table(pkt, service, flow, segments);
	if (!starts_connection(pkt) && !pkt->opens_quic)
		return LB_FORWARD_RECOVER;
	if (has_former_flows(service))
		forget_former(pkt, service, segments->server[0]);
	if (is_observed(service))
		observe_new(pkt, service, segments->server[0]);
	return segments->keeps_whole ? LB_FORWARD_HUNT : LB_FORWARD_NEW;
}

/*
 * Whether create-stickiness enters the flow in the flow table. If not, it enters a hint. After a
 * change from persistence `table`, a flow that has an entry stays in the flow table, because its
 * packets are looked up there first. Without hints, servers signal only flows that were offered
 * before the change, or whose offer asked the server of an entry first. These belong in the flow
 * table. Not inlined: see handle_in_full.
 */
__noinline int enters_flow(const struct packet *pkt, const struct service *service)
{
	struct flow flow = {}, half_open_flow = {};

	if (!pkt || !service)
		return false;
	if (persists_by(service, PERSISTENCE_TABLE))
		return true;
	if (!has_flows(service) || !has_hints())
		return has_flows(service);
	lookup_both(pkt, service, &flow, &half_open_flow);
	return flow_known(&flow) || (has_half_open(service) && flow_known(&half_open_flow));
}

/* Takes note of a server's signal about a flow: create-stickiness, or remove-stickiness. After a
 * change of persistence, both the flow table and the hint table can have the flow. No server
 * signals about flows of QUIC. */
static __always_inline enum lb_reason
take_signal_of(const struct packet *pkt, const struct service *service, __u32 sender, bool removes)
{
	if (!removes)
		return has_features(PERSISTENCE_BIT(PERSISTENCE_TABLE)) && enters_flow(pkt, service)
			       ? take_create_table(pkt, service, sender)
			       : take_create_hint(pkt, service, sender);
	if (!persists_by(service, PERSISTENCE_TABLE))
		take_remove_hint(pkt, service, sender);
	return has_flows(service) ? take_remove_table(pkt, service, sender) : LB_RETURN_REMOVE;
}

#endif
