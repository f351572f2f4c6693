/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `hash`: the first candidate of a flow's bucket that takes new flows gets the flow.
 */
#ifndef SEGUE_BALANCER_PLACE_HASH_H
#define SEGUE_BALANCER_PLACE_HASH_H

#include "balancer/persist/observed.h"
#include "balancer/place/infer.h"

/* Chooses the server of a new flow. False when no server takes new flows. */
static __always_inline bool place_hash_new(const struct flow_key *flow,
					   const struct service *service, struct segments *segments)
{
	__u32 bucket = bucket_of(flow, service);
	int number = candidate_of(service, bucket, 0);
	const struct server *server = server_at(number);

	if (!takes_flows_of(server, service)) {
		number = first_taking(service, bucket);
		if (number < 0)
			return false;
		server = server_at(number);
	}
	go_to(segments, number, server);
	ask(segments, SID_DELIVER, SID_DELIVER);
	return true;
}

/* Gives a flow to the first server of its row that takes new flows, or under `infer` to the one
 * with the lowest score. The offer tells the server its column. False: the row has none. */
static __always_inline bool place_hash_in_row(const struct packet *pkt,
					      const struct service *service,
					      struct segments *segments)
{
	list_takers(service, bucket_of(&pkt->key, service), segments);
	if (segments->count > 1)
		segments->count = 1;
	if (!ask_listed(segments, SID_CONNECT_FORCE, SID_CONNECT_FORCE))
		return false;
	ask_for_cookie(pkt->cookie_width, segments);
	return true;
}

/* Whether a packet of an unknown flow begins the flow, as far as the packet tells: a SYN, or a
 * packet other than TCP. */
static __always_inline bool is_new_flow(const struct packet *pkt)
{
	return starts_connection(pkt) || pkt->key.protocol != IPPROTO_TCP;
}

/*
 * Chooses the servers of a packet whose flow is unknown. A later packet of a TCP connection visits
 * all servers that may have the connection, if they can pass it on. Otherwise it goes where a new
 * flow would go: if the service's servers have not changed, that server has the connection.
 */
static __always_inline bool place_hash(const struct packet *pkt, const struct service *service,
				       struct segments *segments)
{
	if (!is_new_flow(pkt) && service->rule.flags & RULE_SERVERS_PASS_ON)
		return visit(&pkt->key, service,
			     service->rule.flags & RULE_SERVERS_ANSWER ? SID_RECOVER : SID_STEER,
			     segments);
	if (stays_in_row(service))
		return place_hash_in_row(pkt, service, segments);
	return place_hash_new(&pkt->key, service, segments);
}

/* Chooses the servers of a fragment or an ICMP error of an unknown flow. */
static __always_inline bool place_hash_related(const struct flow_key *flow,
					       const struct service *service,
					       struct segments *segments)
{
	if (service->rule.flags & RULE_SERVERS_PASS_ON)
		return visit(flow, service, SID_STEER, segments);
	return place_hash_new(flow, service, segments);
}

#endif
