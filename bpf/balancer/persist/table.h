/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Persistence `table`: the flow table remembers which server has a flow. If servers answer offers
 * of new connections, a server's answer enters the flow. The flow is half-open at first, so that a
 * flood of SYNs leaves no trace in the flow table.
 */
#ifndef SEGUE_BALANCER_PERSIST_TABLE_H
#define SEGUE_BALANCER_PERSIST_TABLE_H

#include "balancer/tables/durations.h"
#include "balancer/tables/flowtable.h"
#include "balancer/tables/halfopen.h"
#include "balancer/segments.h"
#include "balancer/stats.h"

/* Whether the flow table may have flows of the service. */
static __always_inline bool has_flows(const struct service *service)
{
	return persists_by(service, PERSISTENCE_TABLE) || has_former_flows(service);
}

/* What a packet says about its flow. */
static __always_inline enum flow_event event_of(const struct packet *pkt)
{
	enum flow_event event = starts_connection(pkt) ? FLOW_OPENS : FLOW_CONTINUES;

	if (ends_connection(pkt))
		event = pkt->tcp_flags & TCP_RST ? FLOW_RESETS : FLOW_ENDS;
	return (__u8)forget(event);
}

/* Whether a packet can be moved to another server safely: a SYN, or a packet other than TCP. */
static __always_inline bool may_move(const struct packet *pkt)
{
	return starts_connection(pkt) || pkt->key.protocol != IPPROTO_TCP;
}

/*
 * Why a server is not fit for a packet that may move; STAYS: it is fit. A server that has no next
 * hop, or whose next hop does not answer, is never fit. A failing server is fit only in two cases,
 * and only if the flow is not idle. In the first, the packet is a SYN, and the connection may go
 * on: the SYN may be forged. In the second, the server is only unheard: a SYN may be a late copy,
 * and a second server would reset the connection that the client has with the first one.
 */
static __always_inline enum departure why_unfit(const struct server *server,
						const struct flow *flow, bool opens, __u64 now)
{
	bool is_kept = is_only_unheard(server) || (opens && flow_may_go_on(flow, now));

	if (server->flags & SERVER_FAILING && (!is_kept || flow_is_idle(flow, now)))
		return LEAVES_FAILING;
	if (!server->next_hop)
		return LEAVES_NO_NEXT_HOP;
	return is_reachable(server) ? STAYS : LEAVES_UNREACHABLE;
}

/*
 * Why a packet that may move leaves the server of an entry; STAYS: it does not. `opens`: the packet
 * is a SYN. Any such packet leaves an unfit server, and a server with SERVER_LEAVING. A SYN also
 * leaves:
 *
 *	- a server that has ended the connection long ago;
 *	- if servers decide, a drained server, and the server of a connection that the client has
 *	  ended long ago. Such a server may still have the connection, because the SYN, or the
 *	  client's FIN or RST, may be forged. So it is asked first whether it has the connection
 *	  (holder_of);
 *	- if servers do not decide, a drained server whose connection cannot go on.
 *
 * Not inlined: several lookups need it, and it would use much of the stack.
 */
__noinline int why_moves(const struct service *service, __u64 entry, bool opens)
{
	struct flow flow = { .value = entry };
	const struct server *server = server_at(entry_server(entry));
	__u64 now = flow_now();
	enum departure unfit;

	if (!service)
		return STAYS;
	unfit = why_unfit(server, &flow, opens, now);
	if (unfit)
		return unfit;
	if (server->flags & SERVER_LEAVING)
		return LEAVES_DRAINED;
	if (!opens)
		return STAYS;
	if (flow_is_over(&flow, now) || (servers_decide(service) && flow_may_be_over(&flow, now)))
		return LEAVES_OVER;
	if (server->flags & SERVER_DRAINED &&
	    (servers_decide(service) || !flow_may_go_on(&flow, now)))
		return LEAVES_DRAINED;
	return STAYS;
}

/*
 * Why a packet leaves the flow's server; STAYS: it does not. Every packet leaves a server that is
 * not configured any more. If the entry's server belongs to another service, two flows share a
 * signature, and the packet is not of the entry's flow. Packets that may move leave for further
 * reasons (why_moves).
 */
static __always_inline enum departure
why_leaves(const struct packet *pkt, const struct service *service, const struct flow *flow)
{
	const struct server *server = server_at(flow_server(flow));

	if (!(server->flags & SERVER_IN_USE))
		return LEAVES_REMOVED;
	if (!serves(server, service))
		return LEAVES_OTHER_SERVICE;
	return may_move(pkt) ? why_moves(service, flow->value, starts_connection(pkt)) : STAYS;
}

/* Makes the server of a known flow the only segment. False: the flow is not known, or the packet
 * has to go to another server. */
static __always_inline bool keep(const struct packet *pkt, const struct service *service,
				 const struct flow *flow, struct segments *segments)
{
	enum departure departure;

	if (!flow_known(flow))
		return false;
	departure = why_leaves(pkt, service, flow);
	note_entry(flow, departure);
	if (departure)
		return false;
	go_to(segments, flow_server(flow), server_at(flow_server(flow)));
	return true;
}

/*
 * Whether an entry was idle for so long that it proves nothing. The flow may have moved to another
 * balancer and ended there. Then this packet may be of another connection, with another server.
 * Clients rarely reuse a port any sooner. Entries of services whose servers cannot be asked never
 * become stale.
 */
static __always_inline bool is_stale(const struct service *service, const struct flow *flow,
				     __u64 now)
{
	return service->rule.flags & RULE_ASK_IDLE && flow_is_idle(flow, now);
}

/* Notes what the packet tells about its flow. False when the entry is stale: only a server's answer
 * renews a stale entry. */
static __always_inline bool renew(const struct packet *pkt, const struct service *service,
				  struct flow *flow, __u64 now)
{
	if (is_stale(service, flow, now)) {
		note_departure(LEAVES_STALE);
		return false;
	}
	if (has_features(FEATURE_BIT(FEATURE_PACKET_TIMES)))
		time_packet(flow->value, event_of(pkt));
	flow_renew(flow, event_of(pkt), now);
	return true;
}

/* Moves a half-open flow to the flow table, if the packet shows that the client has answered the
 * server (LB_FORWARD_NEW). The flow stays half-open if the packet does not show this
 * (LB_FORWARD_KNOWN), or if the flow table has no room (LB_FORWARD_NO_ROOM). */
static __always_inline enum lb_reason confirm(const struct packet *pkt, struct flow *flow,
					      const struct flow *half_open_flow)
{
	enum flow_state state = flow_next(FLOW_NEW, event_of(pkt));

	if (state == FLOW_NEW)
		return LB_FORWARD_KNOWN;
	if (!flow_enter(flow, flow_server(half_open_flow), state, flow_now(), false))
		return LB_FORWARD_NO_ROOM;
	half_open_remove(half_open_flow);
	return LB_FORWARD_NEW;
}

/* Finds the server of a half-open flow. The reason is none if the flow is not half-open, or has to
 * be placed anew. */
static __always_inline enum lb_reason
lookup_half_open(const struct packet *pkt, const struct service *service, struct flow *flow,
		 const struct flow *half_open_flow, struct segments *segments)
{
	bool keeps = keep(pkt, service, half_open_flow, segments);

	if (flow_known(half_open_flow))
		note_half_open();
	if (!keeps)
		return LB_NONE;
	return confirm(pkt, flow, half_open_flow);
}

/* The server of the flow's entry, if that server may have the flow, although the packet is not to
 * stay with it; negative: there is none. For a SYN, a server is left out if the connection is over.
 * A failing server is left out too, unless it is only unheard: the SYN may be a late one of a
 * connection that this server has. */
static __always_inline int holder_of(const struct packet *pkt, const struct service *service,
				     const struct flow *flow)
{
	const struct server *server;

	if (!flow_known(flow))
		return -1;
	server = server_at(flow_server(flow));
	if (!serves(server, service))
		return -1;
	if (starts_connection(pkt) &&
	    ((server->flags & SERVER_FAILING && !is_only_unheard(server)) ||
	     flow_is_over(flow, flow_now())))
		return -1;
	return flow_server(flow);
}

/*
 * Finds the server of a flow: first by the flow table, then by the table of half-open flows. The
 * reason is none if the flow has to be placed; `holder` is then the server that may have the flow.
 * If the entry is stale, and the flow is not half-open, a SYN goes to the entry's server, whose
 * stack decides what the SYN means. Other packets of a stale entry have to be placed.
 */
static __always_inline enum lb_reason lookup_table(const struct packet *pkt,
						   const struct service *service, struct flow *flow,
						   int *holder, struct segments *segments)
{
	if (!flow->place) /* then lookup_plain() has not computed the hashes */
		flow_identify(flow, &pkt->key, service->vip_id);
	flow->place = forget(flow->place);
	flow->signature = forget(flow->signature);
	flow_find(flow);
	if (keep(pkt, service, flow, segments) && renew(pkt, service, flow, flow_now()))
		return LB_FORWARD_KNOWN;
	if (has_half_open(service)) {
		struct flow half_open_flow;
		enum lb_reason why;

		half_open_lookup(flow, &half_open_flow);
		why = lookup_half_open(pkt, service, flow, &half_open_flow, segments);
		if (why)
			return why;
		if (starts_connection(pkt))
			*holder = holder_of(pkt, service, &half_open_flow);
	}
	if (!flow_known(flow))
		return LB_NONE;
	if (starts_connection(pkt) && keep(pkt, service, flow, segments))
		return LB_FORWARD_KNOWN;
	*holder = holder_of(pkt, service, flow);
	return LB_NONE;
}

/* Finds the server of a plain packet, if that server is well: then no packet of the flow has to
 * move. False: handle_in_full() handles the packet. */
static __always_inline bool lookup_table_plain(const struct packet *pkt,
					       const struct service *service, struct flow *flow,
					       struct segments *segments)
{
	const struct server *server;
	__u64 now;

	flow_lookup(&pkt->key, service->vip_id, flow);
	if (!flow_known(flow))
		return false;
	server = server_at(flow_server(flow));
	if (!is_well(server, service))
		return false;
	note_entry(flow, STAYS);
	go_to(segments, flow_server(flow), server);
	now = flow_now();
	if (flow_is_fresh(flow, now) && !has_features(FEATURE_BIT(FEATURE_PACKET_TIMES)))
		return true;
	return renew(pkt, service, flow, now);
}

/* Makes the server of an entry the only segment. The packet does not prove that it is of the
 * entry's flow, so the server is only asked to deliver it. */
static __always_inline bool recall(const struct service *service, const struct flow *flow,
				   struct segments *segments)
{
	const struct server *server = server_at(flow_server(flow));

	if (!flow_known(flow) || !serves(server, service))
		return false;
	go_to(segments, flow_server(flow), server);
	ask(segments, SID_DELIVER, SID_DELIVER);
	return true;
}

/* Finds the server of a flow for a fragment or an ICMP error. The entry stays as it is. */
static __always_inline bool recall_table(const struct packet *pkt, const struct service *service,
					 struct flow *flow, struct segments *segments)
{
	struct flow half_open_flow;

	flow_lookup(&pkt->key, service->vip_id, flow);
	if (recall(service, flow, segments))
		return true;
	if (!has_half_open(service))
		return false;
	half_open_lookup(flow, &half_open_flow);
	return recall(service, &half_open_flow, segments);
}

/*
 * Remembers where a flow was placed. If the table has no room, each packet of the flow is placed
 * again (choose_without_room), and reaches the same server as long as the candidates stay the same.
 * If servers answer, their answers enter the flow. Here the entry is only renewed, and only if its
 * server is the only one that the packet visits. Without that, the entry of a long upload would
 * look idle. If servers do not answer, a packet that visits several of them enters nothing, because
 * nobody says which of them has the flow.
 */
static __always_inline enum lb_reason commit_table(const struct packet *pkt,
						   const struct service *service, struct flow *flow,
						   const struct segments *segments)
{
	bool is_open = pkt->key.protocol == IPPROTO_TCP && !starts_connection(pkt);

	if (service->rule.flags & RULE_SERVERS_ANSWER) {
		if (starts_connection(pkt))
			return LB_FORWARD_HUNT;
		if (segments->count == 1 && flow_known(flow) &&
		    segments->server[0] == flow_server(flow))
			flow_renew(flow, event_of(pkt), flow_now());
		return LB_FORWARD_RECOVER;
	}
	if (segments->count > 1)
		return LB_FORWARD_RECOVER;
	if (!flow_enter(flow, segments->server[0], FLOW_NEW, flow_now(), false))
		return LB_FORWARD_NO_ROOM;
	if (has_features(FEATURE_BIT(FEATURE_PACKET_TIMES)) && !is_open)
		time_first_packet(flow->signature, segments->server[0]);
	return is_open ? LB_FORWARD_RECOVER : LB_FORWARD_NEW;
}

/*
 * Whether an entry's server has the flow, so that no other server can take it. `sender` is the
 * server whose signal says that it has accepted the flow. A stale entry proves nothing, and neither
 * does one of another service. If the signal answers a SYN, the entry's server has the flow if it
 * would still get a SYN (why_moves). With any other signal, it has the flow unless the flow is
 * closed. A closed flow may begin again on any other server. But until it is over, it still belongs
 * to the entry's server if that is the sender, whose signals may arrive out of order.
 */
static __always_inline bool is_taken(const struct packet *pkt, const struct service *service,
				     const struct flow *flow, __u32 sender, __u64 now)
{
	const struct server *server = server_at(flow_server(flow));

	if (!flow_known(flow) || is_stale(service, flow, now) || !serves(server, service))
		return false;
	if (pkt->tcp_flags & TCP_SYN)
		return !why_moves(service, flow->value, true);
	return !flow_is_closed(flow) || (flow_server(flow) == sender && !flow_is_over(flow, now));
}

/* Enters the server of a SYN-ACK as half-open, and returns the server that has the flow then. The
 * client may have answered another SYN-ACK since the flow table was read. So the flow table is read
 * again: confirm() enters a flow there before it removes the half-open entry. If the flow is there
 * now, the new half-open entry is removed, and the result is HALF_OPEN_NOBODY. It is also
 * HALF_OPEN_NOBODY if no server could be entered. */
static __always_inline int enter_half_open(struct flow *flow, struct flow *half_open_flow,
					   __u32 server)
{
	int winner = half_open_insert(half_open_flow, server);

	if (winner == HALF_OPEN_NOBODY)
		return winner;
	flow_search(flow);
	if (winner != (int)server || !flow_known(flow))
		return winner;
	half_open_remove(half_open_flow);
	return HALF_OPEN_NOBODY;
}

/*
 * Enters the server that has accepted a flow, and returns the server that has the flow then, or
 * HALF_OPEN_NOBODY if none could be entered. The answer to a SYN makes the flow half-open. If the
 * flow has an entry in the flow table, the answer changes that entry instead. A signal on any other
 * packet than a SYN-ACK proves that the connection is established.
 */
static __always_inline int enter_answer(const struct packet *pkt, struct flow *flow,
					struct flow *half_open_flow, __u32 server)
{
	bool is_syn_ack = pkt->tcp_flags & TCP_SYN;

	if (is_syn_ack && !flow_known(flow))
		return enter_half_open(flow, half_open_flow, server);
	if (!flow_enter(flow, server, is_syn_ack ? FLOW_NEW : FLOW_ESTABLISHED, flow_now(), false))
		return HALF_OPEN_NOBODY;
	if (flow_known(half_open_flow))
		half_open_remove(half_open_flow);
	return server;
}

/* Looks up a flow in the flow table, and in the table of half-open flows. */
static __always_inline void lookup_both(const struct packet *pkt, const struct service *service,
					struct flow *flow, struct flow *half_open_flow)
{
	flow_lookup(&pkt->key, service->vip_id, flow);
	half_open_lookup(flow, half_open_flow);
}

/*
 * Handles create-stickiness: the first server keeps the flow, and any other gets a reset. If the
 * server cannot be entered, another core may have been faster: a second try finds out. Not inlined:
 * see handle_in_full.
 */
__noinline int take_create_table(const struct packet *pkt, const struct service *service,
				 __u32 sender)
{
	struct flow flow = {}, half_open_flow = {};

	if (!pkt || !service)
		return LB_NONE;
	for (int i = 0; i < 2; i++) {
		const struct flow *entry;
		int server;

		lookup_both(pkt, service, &flow, &half_open_flow);
		entry = flow_known(&flow) ? &flow : &half_open_flow;
		server = is_taken(pkt, service, entry, sender, flow_now())
				 ? (int)flow_server(entry)
				 : enter_answer(pkt, &flow, &half_open_flow, sender);
		if (server != HALF_OPEN_NOBODY)
			return server == (int)sender ? LB_RETURN_CREATE : LB_FORWARD_RESET;
	}
	return LB_RETURN_NO_ROOM;
}

/* Handles remove-stickiness: closes the flow, or removes it if it is half-open. If the sender is
 * not the flow's own server, nothing changes. Not inlined: see handle_in_full. */
__noinline int take_remove_table(const struct packet *pkt, const struct service *service,
				 __u32 sender)
{
	struct flow flow = {}, half_open_flow = {};

	if (!pkt || !service)
		return LB_NONE;
	lookup_both(pkt, service, &flow, &half_open_flow);
	if (flow_known(&flow)) {
		if (flow_server(&flow) == sender)
			flow_renew(&flow, FLOW_REMOVED, flow_now());
	} else if (flow_known(&half_open_flow) && flow_server(&half_open_flow) == sender) {
		half_open_remove(&half_open_flow);
	}
	return LB_RETURN_REMOVE;
}

#endif
