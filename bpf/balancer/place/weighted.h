/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placements `awcmp` and `weighted-round-robin`: each new flow goes to a random server, or to the
 * next one in turn, in proportion to weights that user space changes often. So there is no table to
 * build: a server is proposed, and takes the flow with a probability of 1 / unit (struct load): its
 * weight divided by the highest weight. Otherwise another server is proposed.
 *
 *	draw: the flow's hash proposes a server, and decides whether it takes the flow;
 *	turn: the servers of the ranking are proposed in cycles. One that takes a share p of its
 *	      turns takes those in which p * cycle passes a whole number, as in a Bresenham line.
 *	      Each server begins at another fraction.
 *
 * Servers that take no new flows are passed over, so the others get their shares in proportion.
 */
#ifndef SEGUE_BALANCER_PLACE_WEIGHTED_H
#define SEGUE_BALANCER_PLACE_WEIGHTED_H

#include "balancer/place/round_robin.h"
#include "balancer/place/sample.h"

/* A share of turns or draws, from 0 to all. */
#define SHARE_ALL (1ULL << 32)

struct weighted {
	const struct service *service;
	const struct ranking *ranking;
	__u64 *turns; /* given out; NULL: draws */
	__u32 hash;   /* of the flow, for draws */
	int server;   /* that takes the flow; negative: none so far */
};

/* The share of its turns or draws that a server takes. */
static __always_inline __u64 share_taken(const struct load *load)
{
	__u64 unit = load->unit;

	return unit > PRICE_ONE ? (SHARE_ALL << PRICE_SHIFT) / unit : SHARE_ALL;
}

/* The slot of a proposed server if it takes the flow; otherwise negative. It takes the flow if the
 * fractional part of ticket + cycle * share is less than the share. For a draw, the ticket is
 * random, and the cycle is 0. For a turn, the ticket is a constant of the server. */
static __always_inline int slot_if_taken(const struct weighted *in, __u32 place, __u32 ticket,
					 __u64 cycle)
{
	__u32 slot = ranked_at(in->ranking, place);
	const struct load *load = load_at(slot);
	__u64 share;

	if (!load || !is_taking(in->service, slot))
		return -1;
	share = share_taken(load);
	return (__u32)(ticket + cycle * share) < share ? (int)slot : -1;
}

/* Proposes a server, by a draw or by the next turn. Returns 1 to end the search. A dry run gives
 * out no turn. */
static long propose(__u32 tried, struct weighted *in)
{
	__u32 servers = in->ranking->servers;
	__u64 turn;

	if (!servers)
		return 1;
	/* A draw has two hashes: one proposes the server, and the other is the ticket. */
	if (!in->turns) {
		in->server = slot_if_taken(in, share_of(draw_hash(in->hash, 2 * tried), servers),
					   draw_hash(in->hash, 2 * tried + 1), 0);
		return in->server >= 0;
	}
	turn = dry_run ? *in->turns + tried : __sync_fetch_and_add(in->turns, 1);
	in->server = slot_if_taken(in, turn % servers, turn % servers * (GOLDEN_RATIO >> 32),
				   turn / servers);
	return in->server >= 0;
}

/* Returns the server that takes the flow. Negative: no server takes new flows, or none of 4096 that
 * were proposed. Not inlined: see handle_in_full. */
__noinline int weighted_server(const struct packet *pkt, const struct service *service)
{
	struct weighted in = { .service = service, .server = -1 };
	__u32 id;

	if (!pkt || !service || !(service->rule.flags & RULE_TAKES_FLOWS))
		return -1;
	id = service->id;
	in.ranking = ranking_of(id);
	if (!in.ranking)
		return -1;
	if (places_by(service, PLACEMENT_BIT(PLACEMENT_WEIGHTED_TURN)))
		in.turns = bpf_map_lookup_elem(&turns, &id);
	in.hash = hash_of(&pkt->key);
	bpf_loop(DRAWS_FOR_ONE, propose, &in, 0);
	return in.server;
}

#endif
