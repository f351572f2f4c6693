/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `infer` among a few random servers: each new flow goes to that server of the sample
 * which has the lowest score (Mitzenmacher, "The Power of Two Choices in Randomized Load
 * Balancing", 2001). With `least-queue` this is what Cilium proposes as least-connection
 * (github.com/cilium/cilium, pull request 47904): it samples two to four servers, and counts the
 * connections of this node.
 *
 * The hash of the flow draws the servers, so a dry run foresees them. The servers of a service are
 * those of its ranking (ranking.h). Only its leaves are read, and only for the servers' slots.
 */
#ifndef SEGUE_BALANCER_PLACE_SAMPLE_H
#define SEGUE_BALANCER_PLACE_SAMPLE_H

#include "balancer/place/hash.h"
#include "balancer/tables/ranking.h"

/* How many draws there are at most until one finds a server that takes new flows. So many draws
 * nearly always find one, even if only one server in a thousand takes new flows. */
#define DRAWS_FOR_ONE 4096
/* How many draws there are at most once a server is found. With two servers that take new flows, 1
 * sample in 32,768 lacks the second. */
#define DRAWS_FOR_MORE 16

struct sample {
	__u32 found;  /* servers so far */
	__u32 best;   /* the first of them with the lowest score */
	__u64 lowest; /* its score */
	__u64 slots;  /* of the last four, with 16 bits each; NO_SERVER: fewer were found */
};

struct sampling {
	const struct service *service;
	const struct ranking *ranking;
	struct sample *sample;
	__u32 hash;   /* of the flow */
	__u32 wanted; /* servers to find */
};

/* The hash for a draw of a flow. For successive draws it mixes numbers that are far apart:
 * multiples of 2^32 divided by the golden ratio. */
static __always_inline __u32 draw_hash(__u32 hash, __u32 draw)
{
	return mix(hash + draw * (__u32)(GOLDEN_RATIO >> 32));
}

/* The server in a place of a service's ranking, or NO_SERVER. */
static __always_inline __u32 ranked_at(const struct ranking *ranking, __u32 place)
{
	const struct rank_line *line = rank_line_at(ranking->first + place / RANKS_PER_LINE);
	__u64 rank = line ? line->node[place % RANKS_PER_LINE] : RANK_NONE;

	return rank == RANK_NONE ? NO_SERVER : rank & RANK_SLOT_MASK;
}

/* Whether a server is one of the last four that were drawn. */
static __always_inline bool is_sampled(const struct sample *sample, __u32 slot)
{
	__u64 slots = sample->slots;

	return slot == (slots & RANK_SLOT_MASK) || slot == (slots >> 16 & RANK_SLOT_MASK) ||
	       slot == (slots >> 32 & RANK_SLOT_MASK) || slot == slots >> 48;
}

/* Adds a server to the sample. */
static __always_inline void add_to_sample(struct sample *sample, __u32 slot,
					  const struct load *load)
{
	__u64 score = score_of(load);

	sample->slots = sample->slots << 16 | slot;
	if (!sample->found++ || score < sample->lowest) {
		sample->lowest = score;
		sample->best = slot;
	}
}

/* Draws a server. Returns 1 to end the draws. */
static long draw_server(__u32 draw, const struct sampling *in)
{
	__u32 place = share_of(draw_hash(in->hash, draw), in->ranking->servers);
	__u32 slot = ranked_at(in->ranking, place);
	const struct load *load = load_at(slot);
	struct sample *sample = in->sample;

	if (load && is_taking(in->service, slot) && !is_sampled(sample, slot))
		add_to_sample(sample, slot, load);
	return sample->found >= in->wanted || (sample->found && draw >= DRAWS_FOR_MORE - 1);
}

/* Draws servers that take new flows. Not inlined, so that the verifier does not follow the content
 * of `sample`. */
__noinline int draw_sample(const struct packet *pkt, const struct service *service,
			   struct sample *sample)
{
	struct sampling in = { .service = service, .sample = sample };

	if (!pkt || !service || !sample || !(service->rule.flags & RULE_TAKES_FLOWS))
		return 0;
	in.ranking = ranking_of(service->id);
	if (!in.ranking)
		return 0;
	in.hash = hash_of(&pkt->key);
	in.wanted = placement_of(service) - PLACEMENT_INFER_TWO + 2;
	bpf_loop(DRAWS_FOR_ONE, draw_server, &in, 0);
	return 0;
}

/* Returns the server with the lowest score of a random sample of those that take new flows;
 * negative: there is none. Not inlined: see handle_in_full. */
__noinline int best_of_sample(const struct packet *pkt, const struct service *service)
{
	struct sample sample = { .slots = ~0ULL };

	draw_sample(pkt, service, &sample);
	return sample.found ? (int)sample.best : -1;
}

#endif
