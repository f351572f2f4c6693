/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement: which servers get a new flow, or are offered it. A method is made of two things: where
 * its candidates come from, and who decides among them. Either servers decide (servers_decide), or
 * the balancer picks a server of its own accord (picks), or the first candidate of the flow's
 * bucket gets the flow (PLACEMENT_HASH). Each method has a header of its own.
 */
#ifndef SEGUE_BALANCER_PLACEMENT_H
#define SEGUE_BALANCER_PLACEMENT_H

#include "place_hash.h"
#include "place_hunt.h"
#include "place_infer.h"
#include "place_round_robin.h"
#include "place_sample.h"
#include "place_weighted.h"

/* Whether the balancer picks one server for a new flow. Other packets of flows that it does not
 * know are handled as under hash. */
static __always_inline bool picks(const struct service *service)
{
	return placement_of(service) != PLACEMENT_HASH && !servers_decide(service);
}

/* Whether the candidates of a flow are those of its bucket's row, and no others. */
static __always_inline bool from_row(const struct service *service)
{
	switch (placement_of(service)) {
	case PLACEMENT_HASH:
	case PLACEMENT_HUNT:
	case PLACEMENT_HUNT_REPORTS:
	case PLACEMENT_INFER_ROW:
		return true;
	default:
		return false;
	}
}

/* The server of a new flow, if the placement picks one of its own accord, and the flow's bucket
 * does not tell it; negative: there is none. */
static __always_inline int pick(const struct packet *pkt, const struct service *service)
{
	switch (placement_of(service)) {
	case PLACEMENT_ROUND_ROBIN:
		return next_in_turn(service);
	case PLACEMENT_INFER:
		return best_server(service);
	case PLACEMENT_INFER_TWO ... PLACEMENT_INFER_FOUR:
		return best_of_sample(pkt, service);
	case PLACEMENT_WEIGHTED_DRAW:
	case PLACEMENT_WEIGHTED_TURN:
		return weighted_server(pkt, service);
	default:
		return best_candidate(service, bucket_of(&pkt->key, service->rule.buckets));
	}
}

/* Gives a new flow to the server that the placement picks. False: the packet is not of a new flow,
 * or no server was found. */
static __always_inline bool place_picked(const struct packet *pkt, const struct service *service,
					 struct segments *segments)
{
	int number = is_new_flow(pkt) ? pick(pkt, service) : -1;

	if (number < 0)
		return false;
	barrier_var(number); /* the compiler knows its range, and the verifier does not */
	take_trial(number);
	note_pick(true);
	go_to(segments, number, server_at(number));
	ask(segments, SID_DELIVER, SID_DELIVER);
	return true;
}

/* Chooses servers for a packet whose flow persistence does not know for sure. A `holder` that is
 * not negative is a server that may have the flow. False: the service has no server. */
static __always_inline bool choose(const struct packet *pkt, const struct service *service,
				   int holder, struct segments *segments)
{
	switch (placement_of(service)) {
	case PLACEMENT_INFER:
	case PLACEMENT_INFER_ROW:
	case PLACEMENT_INFER_TWO:
	case PLACEMENT_INFER_THREE:
	case PLACEMENT_INFER_FOUR:
	case PLACEMENT_WEIGHTED_DRAW:
	case PLACEMENT_WEIGHTED_TURN:
	case PLACEMENT_ROUND_ROBIN:
		if (place_picked(pkt, service, segments))
			return true;
		/* Other packets are handled as under hash. */
		__attribute__((fallthrough));
	case PLACEMENT_HASH:
		return place_hash(pkt, service, segments);
	case PLACEMENT_HUNT:
	case PLACEMENT_HUNT_RANDOM:
	case PLACEMENT_HUNT_REPORTS:
	case PLACEMENT_HUNT_SPARE:
		return place_hunt(pkt, service, holder, segments);
	}
	return false;
}

/*
 * Chooses servers again for a flow that persistence has no room for, so that the flow's next packet
 * comes to the same server. Hash and hunt need no other choice: the first is the same for each
 * packet, and servers decide about the second. False: the service has no server.
 */
static __always_inline bool choose_without_room(const struct packet *pkt,
						const struct service *service,
						struct segments *segments)
{
	if (!picks(service))
		return true;
	note_pick(false);
	return place_hash(pkt, service, segments);
}

/* Whether a flow's bucket tells which servers may have the flow, as far as the flow is not older
 * than the generations of the service's servers. */
static __always_inline bool bucket_tells(const struct service *service)
{
	if (service->rule.flags & RULE_IN_ROW)
		return true;
	if (picks(service) && !(service->rule.flags & RULE_SERVERS_PASS_ON))
		return false; /* any server of the row may have the flow */
	return from_row(service);
}

/* Chooses servers that may have an unknown flow, for a fragment or an ICMP error of it. */
static __always_inline bool choose_related(const struct packet *pkt, const struct service *service,
					   struct segments *segments)
{
	return servers_decide(service) ? visit(&pkt->key, service, SID_STEER, segments)
				       : place_hash_related(&pkt->key, service, segments);
}

/* Notes where a packet's flow is placed if no server has it. Not inlined: the verifier walks it
 * once, and not again for each path to it. */
__noinline int note_placement(const struct packet *pkt)
{
	struct segments segments = {};
	struct service service = {};

	if (!dry_run || !pkt)
		return 0;
	service.rule = decision.rule;
	service.id = decision.service;
	decision.placement.is_placed = true;
	decision.placement.bucket = bucket_of(&pkt->key, service.rule.buckets);
	if (!choose(pkt, &service, -1, &segments))
		return 0;
	if (decision.reason == LB_FORWARD_NO_ROOM && !choose_without_room(pkt, &service, &segments))
		return 0;
	decision.placement.count = segments.count;
	for (__u32 i = 0; i < MAX_SEGMENTS; i++)
		decision.placement.candidate[i] = segments.server[i];
	return 0;
}

#endif
