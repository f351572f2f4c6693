/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Persistence `hint`: a small table tells which server probably has a flow (hints.h). The server
 * checks. If it does not have the flow, it returns the packet, which then visits all servers that
 * may have the flow. So a wrong hint costs a detour, and a lost one a longer list, but neither
 * costs a connection. Servers' signals enter and remove the hints.
 */
#ifndef SEGUE_BALANCER_PERSIST_HINT_H
#define SEGUE_BALANCER_PERSIST_HINT_H

#include "balancer/tables/columns.h"
#include "balancer/tables/hints.h"
#include "balancer/persist/table.h"

/* What is asked of a server that a hint names. */
#define SID_HINTED (SID_LOW(SID_STEER) | (__u32)bpf_cpu_to_be64(LOAD_RETURN))

/* Whether the lookup found a hint that names a column of the service. A column behind the end of
 * the row comes from another flow's hint, or from before a change of `candidates`. */
static __always_inline bool hint_fits(const struct hint *hint, const struct service *service)
{
	return hint_known(hint) && hint_column(hint->value) < candidates_of(service);
}

/* Makes the server that a hint names the only segment. If that server does not have the flow, it is
 * to return the packet. */
static __always_inline void go_to_hinted(__u32 number, const struct server *server,
					 struct segments *segments)
{
	go_to(segments, number, server);
	segments->first_sid = SID_HINTED;
}

/* Finds the server of a plain packet, if the flow has a hint and the hint's column never had
 * another server. False: handle_in_full() decides. */
static __always_inline bool lookup_hint_plain(const struct packet *pkt,
					      const struct service *service, struct flow *flow,
					      struct segments *segments)
{
	const struct server *server;
	struct hint hint;
	__u32 number;

	hint_lookup(&pkt->key, service->vip_id, &hint);
	if (!hint_fits(&hint, service))
		return false;
	number = only_server_of(service, bucket_of(&pkt->key, service), hint_column(hint.value));
	server = server_at(number);
	if (!hint_names(hint.value, number) || !serves(server, service))
		return false;
	flow_assume(flow, &pkt->key, number);
	hint_renew(&hint);
	go_to_hinted(number, server, segments);
	return true;
}

/* The server that the flow's hint names. Negative: there is none, or the packet has to visit all
 * servers that may have the flow. Any packet but a SYN renews the hint. Not inlined: see
 * handle_in_full. */
__noinline int hinted_server(const struct packet *pkt, const struct service *service)
{
	struct hint hint;
	int number;

	if (!pkt || !service)
		return -1;
	hint_lookup(&pkt->key, service->vip_id, &hint);
	if (!hint_fits(&hint, service) || pkt->visits_all)
		return -1;
	number = server_with_mark(service, bucket_of(&pkt->key, service), hint.value);
	if (number >= 0 && !starts_connection(pkt))
		hint_renew(&hint);
	return number;
}

/* Finds the server of a flow by its hint. The reason is none if the flow has to be placed: it has
 * no hint, or the packet is a SYN. For a SYN, `holder` is the server that the hint names, unless
 * that server fails. */
static __always_inline enum lb_reason lookup_hint(const struct packet *pkt,
						  const struct service *service, int *holder,
						  struct segments *segments)
{
	int number = hinted_server(pkt, service);

	if (number < 0)
		return LB_NONE;
	if (starts_connection(pkt)) {
		if (!(server_at(number)->flags & SERVER_FAILING))
			*holder = number;
		return LB_NONE;
	}
	go_to_hinted(number, server_at(number), segments);
	return LB_FORWARD_KNOWN;
}

/* Handles create-stickiness: enters a hint that names the sender. Not inlined: see
 * handle_in_full. */
__noinline int take_create_hint(const struct packet *pkt, const struct service *service,
				__u32 sender)
{
	struct hint hint;
	int column;

	if (!pkt || !service || !has_hints()) /* without hints, nothing has to be entered */
		return LB_RETURN_CREATE;
	column = column_with(service, bucket_of(&pkt->key, service), sender);
	hint_lookup(&pkt->key, service->vip_id, &hint);
	if (column < 0 || !hint_enter(&hint, column, sender, !(pkt->tcp_flags & TCP_SYN)))
		return LB_RETURN_NO_ROOM;
	return LB_RETURN_CREATE;
}

/* Handles remove-stickiness: removes the hint if it names the sender. Not inlined: see
 * handle_in_full. */
__noinline int take_remove_hint(const struct packet *pkt, const struct service *service,
				__u32 sender)
{
	struct hint hint;

	if (!pkt || !service)
		return 0;
	hint_lookup(&pkt->key, service->vip_id, &hint);
	hint_remove(&hint, sender);
	return 0;
}

#endif
