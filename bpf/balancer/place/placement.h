/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement: which servers get a new flow, or are offered it. A method is made of two things: where
 * its candidates come from, and who decides among them. Either servers decide (servers_decide), or
 * the balancer picks a server of its own accord (pick), or the first candidate of the flow's bucket
 * gets the flow (PLACEMENT_HASH). Each method has a header of its own. Sets of methods that have
 * something in common are in features.h.
 */
#ifndef SEGUE_BALANCER_PLACE_PLACEMENT_H
#define SEGUE_BALANCER_PLACE_PLACEMENT_H

#include "balancer/place/hash.h"
#include "balancer/place/hunt.h"
#include "balancer/place/infer.h"
#include "balancer/place/round_robin.h"
#include "balancer/place/sample.h"
#include "balancer/place/weighted.h"

/* The server of a new flow, if the placement picks one of its own accord, and the flow's bucket
 * does not tell it; negative: there is none. */
static __always_inline int pick(const struct packet *pkt, const struct service *service)
{
	if (places_by(service, PLACEMENT_BIT(PLACEMENT_ROUND_ROBIN)))
		return next_in_turn(service);
	if (places_by(service, PLACEMENT_BIT(PLACEMENT_INFER)))
		return best_server(service);
	if (places_by(service, PLACEMENTS_SAMPLING))
		return best_of_sample(pkt, service);
	if (places_by(service, PLACEMENTS_WEIGHTED))
		return weighted_server(pkt, service);
	if (places_by(service, PLACEMENT_BIT(PLACEMENT_INFER_ROW)))
		return best_candidate(service, bucket_of(&pkt->key, service));
	return -1;
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
	if (places_by(service, PLACEMENTS_HUNTING) && is_hunted(pkt))
		return place_hunt(pkt, service, holder, segments);
	/* Packets for which nothing is picked are handled as under hash. */
	return (places_by(service, PLACEMENTS_PICKING) && place_picked(pkt, service, segments)) ||
	       place_hash(pkt, service, segments);
}

/*
 * Chooses servers again for a flow that persistence has no room for, so that the flow's next packet
 * comes to the same server. Hash and hunt need no other choice: hash chooses the same server for
 * each packet, and under hunt the servers decide. False: the service has no server.
 */
static __always_inline bool choose_without_room(const struct packet *pkt,
						const struct service *service,
						struct segments *segments)
{
	if (!places_by(service, PLACEMENTS_PICKING))
		return true;
	note_pick(false);
	return place_hash(pkt, service, segments);
}

/* Whether a flow's bucket tells which servers may have the flow, so that a packet can find the
 * flow's server without persistence. Flows older than all generations of the candidate table do not
 * matter here. */
static __always_inline bool bucket_tells(const struct service *service)
{
	if (stays_in_row(service))
		return true;
	/* No server can be asked about a flow of QUIC. */
	if (persists_by(service, PERSISTENCE_QUIC))
		return !places_by(service, PLACEMENTS_HUNTING);
	/* Any server of the row may have the flow, so one has to pass the packet on. */
	if (places_by(service, PLACEMENT_BIT(PLACEMENT_INFER_ROW)))
		return service->rule.flags & RULE_SERVERS_PASS_ON;
	/* These placements give flows to servers outside the row. */
	return !places_by(service, PLACEMENTS_PICKING | PLACEMENT_BIT(PLACEMENT_HUNT_RANDOM) |
					   PLACEMENT_BIT(PLACEMENT_HUNT_SPARE));
}

/* Chooses servers that may have an unknown flow, for a fragment or an ICMP error of it. */
static __always_inline bool choose_related(const struct packet *pkt, const struct service *service,
					   struct segments *segments)
{
	return places_by(service, PLACEMENTS_HUNTING) && is_hunted(pkt)
		       ? visit(&pkt->key, service, SID_STEER, segments)
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
	decision.placement.bucket = bucket_of(&pkt->key, &service);
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
