/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `hunt`: the servers decide. A SYN is offered to a few in turn, and the
 * one that takes it tells the balancer by its answer (stickiness.h). Until then
 * nothing of the flow is known here, so that a flood of SYNs leaves no trace.
 *
 * Desmouceaux et al., "6LB: Scalable and Application-Aware Load Balancing with
 * Segment Routing", 2018, sections II to IV; with random candidates "SRLB: The Power
 * of Choices in Load Balancing with Segment Routing", 2017.
 */
#ifndef SEGUE_HUNT_H
#define SEGUE_HUNT_H

#include "pending.h"
#include "persist.h"
#include "place.h"
#include "stats.h"

static __always_inline bool hunts(const struct service *service)
{
	return placement_of(service) != PLACEMENT_HASH;
}

/* The candidate that comes so many after another, around the row. */
static __always_inline __u32 candidate_after(const struct service *service, __u32 choice,
					     __u32 distance)
{
	return (choice + distance) % service->rule.candidates;
}

/* Which candidate of a row is the first that can be reached; the very first, if none
 * can. */
static __always_inline __u32 first_reachable(const struct service *service, __u32 bucket)
{
	for (__u32 i = 0; i < MAX_CANDIDATES && i < service->rule.candidates; i++) {
		const struct server *server;
		__u32 number;

		if (!bucket_candidate(service, TABLE_PRESENT, bucket, i, &number))
			return 0;
		server = server_at(number);
		if (server->next_hop)
			return i;
	}
	return 0;
}

/*
 * Lists a row's candidates, from the first that can be reached: those in front of it
 * come last, for what others cannot be passed the packet by. False when there are none.
 * Not inlined: see steer_unusual.
 */
__noinline int list_row(const struct service *service, __u32 bucket, struct segments *segments)
{
	__u32 count, first;

	if (!service || !segments)
		return false;
	count = service->rule.candidates;
	if (!service->rule.buckets || !count || count > MAX_CANDIDATES)
		return false;
	first = first_reachable(service, bucket);
	for (__u32 i = 0; i < MAX_CANDIDATES && i < count; i++) {
		if (!bucket_candidate(service, TABLE_PRESENT, bucket,
				      candidate_after(service, first, i), &segments->server[i]))
			return false;
	}
	segments->count = count;
	return true;
}

/* Says what is asked of the servers listed, and of the last of them. */
static __always_inline void ask_listed(struct segments *segments, enum sid_function each,
				       enum sid_function last)
{
	segments->first = server_at(segments->server[0]);
	ask(segments, each, last);
}

static __always_inline bool is_listed(const struct segments *segments, __u32 number)
{
	for (__u32 i = 0; i < MAX_CANDIDATES && i < segments->count; i++) {
		if (segments->server[i] == number)
			return true;
	}
	return false;
}

/*
 * Lists the servers, too, that the row had before the servers last changed, and can be
 * reached: a flow from then may be there. Not inlined: see steer_unusual.
 */
__noinline int list_former(const struct service *service, __u32 bucket, struct segments *segments)
{
	if (!service || !segments || !(service->rule.table & RULE_FORMER))
		return 0;
	for (__u32 i = 0; i < MAX_CANDIDATES && i < service->rule.candidates; i++) {
		__u32 count = segments->count, number;
		const struct server *server;

		if (count >= MAX_CANDIDATES ||
		    !bucket_candidate(service, TABLE_FORMER, bucket, i, &number))
			break;
		server = server_at(number);
		if (!serves(server, service) || !server->next_hop || is_listed(segments, number))
			continue;
		segments->server[count] = number;
		segments->count = count + 1;
	}
	return 0;
}

/* Asks a flow's own candidates, which are the same on all balancers. */
static __always_inline bool ask_own(const struct flow_key *flow, const struct service *service,
				    struct segments *segments, enum sid_function function)
{
	__u32 bucket = bucket_of(flow, service->rule.buckets);

	if (!list_row(service, bucket, segments))
		return false;
	list_former(service, bucket, segments);
	ask_listed(segments, function, function);
	return true;
}

/* Offers a new connection to candidates; the last one has to take it. */
static __always_inline bool offer(const struct flow_key *flow, const struct service *service,
				  struct segments *segments)
{
	__u32 buckets = service->rule.buckets;
	__u32 bucket = bucket_of(flow, buckets);

	if (placement_of(service) == PLACEMENT_HUNT_RANDOM)
		bucket = (__u64)bpf_get_prandom_u32() * buckets >> 32;
	if (!list_row(service, bucket, segments))
		return false;
	ask_listed(segments, SID_CONNECT_AVAIL, SID_CONNECT_FORCE);
	return true;
}

/* The client has answered the server: from now on the flow is known. */
static __always_inline enum reason confirm(const struct packet *pkt, struct flow_slot *flow,
					   const struct flow_slot *half, __u32 server)
{
	enum flow_state state = ends_connection(pkt) ? FLOW_CLOSING : FLOW_ESTABLISHED;

	if (!flow_insert(flow, server, state, flow_now()))
		return REASON_FORWARD_NO_ROOM;
	pending_remove(half);
	return REASON_FORWARD_NEW;
}

/* Finds the servers of a flow that the flow table does not know: the one that has
 * answered its SYN, or else candidates. */
static __always_inline enum reason hunt(const struct packet *pkt, const struct service *service,
					struct flow_slot *flow, struct segments *segments)
{
	struct flow_slot half;

	pending_lookup(flow, &half);
	if (flow_known(&half) && keep(pkt, service, half.value, segments)) {
		if (starts_connection(pkt))
			return REASON_FORWARD_KNOWN;
		return confirm(pkt, flow, &half, segments->server[0]);
	}
	if (starts_connection(pkt))
		return offer(&pkt->key, service, segments) ? REASON_FORWARD_HUNT
							   : REASON_DROP_NO_SERVER;
	return ask_own(&pkt->key, service, segments, SID_RECOVER) ? REASON_FORWARD_RECOVER
								  : REASON_DROP_NO_SERVER;
}

#endif
