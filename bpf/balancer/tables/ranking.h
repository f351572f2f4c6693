/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rankings: which server of a service has the lowest score. Placement `infer` takes that one.
 *
 *	load  = established flows + new flows (above SURE_NEW, 64 of them count as one)
 *	delay = extra + (load + 1) * unit
 *
 * This is HLB's (l + 1) / w (section IV-B3), with unit = 1 / w. User space writes the price: unit,
 * extra, position and is_away (struct load). A flow waits where the delay is more than 1. Among
 * servers where it does not wait, the score puts those of other balancers behind the balancer's
 * own. So scores have the order of infer.Territory or, without is_away, that of the delays. A
 * server with trials has the score 0.
 *
 * A ranking is a tree, so that a thousand servers cost little more than eight. A line has eight
 * nodes. The leaves are the servers' ranks: score, position and slot in one number. Each line has a
 * node in the level above, with the lowest of the line's numbers. The highest level is one line.
 *
 *	[ 3 5 ]                  line 18: the top
 *	[ 3 7 ... ] [ 5 9 ... ]  lines 16 and 17
 *	[ 3 8 ... ] ...          lines 0 to 15: 128 servers
 *
 * A flow that leaves a server lowers its rank at once, except in a sweep and in a flood. A flow
 * that begins changes only the load. best_server() compares the lowest rank with the load, and
 * corrects it. Cores correct ranks without locks and without barriers, which would take most of the
 * time. If two cores correct a line and the node above it at the same moment, the node can be
 * wrong. A number that is too low is corrected when it is found. A number that is too high hides
 * the servers of the line, until one of them is corrected. User space corrects all numbers at each
 * step (rank_servers), so that no server is hidden for longer.
 */
#ifndef SEGUE_BALANCER_TABLES_RANKING_H
#define SEGUE_BALANCER_TABLES_RANKING_H

#include "balancer/tables/directory.h"
#include "balancer/tables/loads.h"
#include "balancer/segments.h"
#include "balancer/tables/services.h"

/* The number of fractional bits of a price. 1 is one flow per unit of capacity. */
#define PRICE_SHIFT 16
#define PRICE_ONE (1ULL << PRICE_SHIFT)
/* A rank has the score in its highest bits, then the server's position (struct load), then its
 * slot. It is positive as a signed number. */
#define RANK_SCORE_SHIFT 28
#define RANK_POSITION_SHIFT 16
#define RANK_SLOT_MASK 0xffffULL
#define RANK_POSITION_MASK 0xfffULL
#define MAX_SCORE ((1ULL << (63 - RANK_SCORE_SHIFT)) - 1)
/* The rank of a server that takes no new flows, and of a place without a server. */
#define RANK_NONE (~0ULL >> 1)
/* A ranking of all servers has no more levels than this: 8^6 is more than MAX_SERVERS. */
#define RANK_LEVELS 6

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERVICES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct ranking);
} rankings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct rank_line);
} rank_lines SEC(".maps");

/* The slots whose servers rank_servers() ranks again. */
struct rank_run {
	__u32 first;
	__u32 count;
};

static __always_inline struct rank_line *rank_line_at(__u32 number)
{
	return bpf_map_lookup_elem(&rank_lines, &number);
}

/* The score of a load, from 0 to MAX_SCORE. Without branches: the verifier follows this for each
 * rank that a packet corrects. */
static __always_inline __u64 score_of(const struct load *load)
{
	__u64 delay = load->extra + next_load(load) * load->unit;
	__u64 waits = (PRICE_ONE - delay) >> 63; /* 1 if the flow waits */
	__s64 no_trials =
		(trials_of(load) - 1) >> 63; /* 0 if the server has trials; else all ones */

	barrier_var(no_trials);
	delay += (waits | load->is_away) << PRICE_SHIFT;
	return lower_of(delay, MAX_SCORE) & no_trials;
}

/* The rank of a server in this slot with this load. */
static __always_inline __u64 rank_of(__u32 slot, const struct load *load)
{
	return score_of(load) << RANK_SCORE_SHIFT |
	       (load->position & RANK_POSITION_MASK) << RANK_POSITION_SHIFT | slot;
}

/* The rank that a server is to have now. */
static __always_inline __u64 present_rank(const struct server *server, __u32 slot,
					  const struct load *load)
{
	struct service service = { .id = server->service };

	return takes_flows_of(server, &service) ? rank_of(slot, load) : RANK_NONE;
}

/* The lowest number in a line. */
static __always_inline __u64 lowest_of(const struct rank_line *line)
{
	const volatile __u64 *node = line->node;

	return lower_of(lower_of(lower_of(node[0], node[1]), lower_of(node[2], node[3])),
			lower_of(lower_of(node[4], node[5]), lower_of(node[6], node[7])));
}

/* How many lines this number of nodes fills. */
static __always_inline __u32 lines_of(__u32 nodes)
{
	return (nodes + RANKS_PER_LINE - 1) / RANKS_PER_LINE;
}

/* Writes a rank to its leaf, and corrects the numbers above it: with `to_top` all of them, or else
 * up to the first one that is right. Not inlined: see handle_in_full. */
__noinline int set_rank(const struct ranking *ranking, __u32 place, __u64 rank, bool to_top)
{
	__u32 first, nodes;
	struct rank_line *line;

	if (!ranking)
		return 0;
	first = ranking->first;
	nodes = ranking->servers;
	line = rank_line_at(first + place / RANKS_PER_LINE);
	if (!line || place >= nodes)
		return 0;
	*(volatile __u64 *)&line->node[place % RANKS_PER_LINE] = rank;
	for (int level = 0; level < RANK_LEVELS; level++) {
		__u32 lines = lines_of(nodes);
		struct rank_line *above;
		volatile __u64 *node;
		__u64 lowest;

		if (lines <= 1)
			return 0;
		place /= RANKS_PER_LINE;
		first += lines;
		nodes = lines;
		above = rank_line_at(first + place / RANKS_PER_LINE);
		if (!above)
			return 0;
		node = &above->node[place % RANKS_PER_LINE];
		lowest = lowest_of(line);
		if (*node != lowest)
			*node = lowest;
		else if (!to_top)
			return 0;
		line = above;
	}
	return 0;
}

/*
 * Lowers a rank and the numbers above it, as far as they are higher. A rank that is lower already
 * is outdated: best_server() corrects it when it finds it.
 */
static __always_inline void lower_rank(const struct ranking *ranking, __u32 place, __u64 rank)
{
	__u32 first, nodes;

	if (!ranking)
		return;
	first = ranking->first;
	nodes = ranking->servers;
	if (place >= nodes)
		return;
	for (int level = 0; level < RANK_LEVELS; level++) {
		__u32 lines = lines_of(nodes);
		struct rank_line *line = rank_line_at(first + place / RANKS_PER_LINE);
		volatile __u64 *node;

		if (!line)
			return;
		node = &line->node[place % RANKS_PER_LINE];
		if (*node <= rank)
			return;
		*node = rank;
		if (lines <= 1)
			return;
		place /= RANKS_PER_LINE;
		first += lines;
		nodes = lines;
	}
}

static __always_inline const struct ranking *ranking_of(__u32 service)
{
	return bpf_map_lookup_elem(&rankings, &service);
}

/* The number of the cache line that has the root of a ranking's tree. */
static __always_inline __u32 top_of(const struct ranking *ranking)
{
	__u32 first = ranking->first, nodes = ranking->servers;

	for (int level = 0; level < RANK_LEVELS && nodes > RANKS_PER_LINE; level++) {
		nodes = lines_of(nodes);
		first += nodes;
	}
	return first;
}

#endif
