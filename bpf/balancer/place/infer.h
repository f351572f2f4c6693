/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `infer`: each new flow goes to the server with the lowest score, over all servers of
 * the service, or over the candidates of the flow's bucket (HLB, section IV-B3; ranking.h). In the
 * first case the bucket of a flow does not tell the flow's server, and only persistence knows it.
 * Other packets of unknown flows are handled as under `hash`.
 */
#ifndef SEGUE_BALANCER_PLACE_INFER_H
#define SEGUE_BALANCER_PLACE_INFER_H

#include "balancer/tables/candidates.h"
#include "balancer/tables/observe.h"

/* How many ranks a packet corrects at most. Then it takes the last server that it has found. Each
 * flow that is placed makes one rank outdated, so most packets correct one. */
#define MOST_CORRECTIONS 8

/* The slot of the server that got the last new flow of each service on this core, plus 1; 0:
 * none. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MAX_SERVICES);
	__type(key, __u32);
	__type(value, __u32);
} latest SEC(".maps");

/*
 * Whether a server has the lowest score. The core asks this about the server that got its last new
 * flow, and if so takes that server again. Otherwise all cores would choose the same server at the
 * same moment, and write the same cache lines: HLB's mix of packets
 * (docs/understand/performance.md) would take 1.4 times as long on two cores. Under HLB as printed
 * (TIMING_PACKETS) no core asks: the positions alone decide between servers of equal scores.
 */
static __always_inline bool may_stay(const struct service *service, __u32 slot, __u64 lowest_rank)
{
	const struct load *load = load_at(slot);

	if (has_features(FEATURE_BIT(FEATURE_PACKET_TIMES)) && times_packets(slot))
		return false;
	return load && takes_flows_of(server_at(slot), service) &&
	       score_of(load) <= lowest_rank >> RANK_SCORE_SHIFT;
}

/* The lowest rank of the ranking whose top is this line. */
static __always_inline __u64 lowest_rank(__u32 top)
{
	const struct rank_line *line = rank_line_at(top);

	return line ? lowest_of(line) : RANK_NONE;
}

/* Returns the server with the lowest score that takes new flows. It corrects each rank that is the
 * lowest one and outdated. After MOST_CORRECTIONS, it takes the last server found that takes new
 * flows. Negative: it has found none. `top` is the line at the top of the ranking, and `rank` the
 * lowest rank. */
static __always_inline int find_lowest(const struct service *service, const struct ranking *ranking,
				       __u32 top, __u64 rank)
{
	int best = -1;

	for (int i = 0; i < MOST_CORRECTIONS; i++) {
		__u32 slot = rank & RANK_SLOT_MASK;
		const struct server *server = server_at(slot);
		const struct load *load = load_at(slot);
		__u64 now = RANK_NONE;

		if (rank == RANK_NONE || !load)
			return best;
		if (takes_flows_of(server, service)) {
			best = slot;
			now = rank_of(slot, load);
		}
		/* The search ends if the rank was right, or cannot be corrected. A dry run changes
		 * nothing: user space corrects all ranks before it. */
		if (now == rank || dry_run || !serves(server, service) || !server->rank)
			return best;
		set_rank(ranking, server->rank - 1, now, false);
		rank = lowest_rank(top);
	}
	return best;
}

/* Returns the server with the lowest score, for a new flow; negative: there is none. Not inlined:
 * see handle_in_full. */
__noinline int best_server(const struct service *service)
{
	const struct ranking *ranking;
	__u32 id, top, *last;
	__u64 rank;
	int best;

	if (!service || !(service->rule.flags & RULE_TAKES_FLOWS))
		return -1;
	id = service->id; /* Linux 6.1 takes no key from a parameter of a global function */
	ranking = ranking_of(id);
	last = bpf_map_lookup_elem(&latest, &id);
	if (!ranking || !ranking->servers || !last)
		return -1;
	top = top_of(ranking);
	rank = lowest_rank(top);
	if (*last && may_stay(service, *last - 1, rank))
		return *last - 1;
	best = find_lowest(service, ranking, top, rank);
	if (!dry_run)
		*last = best + 1;
	return best;
}

/* Returns the candidate of the flow's bucket with the lowest score that takes new flows; negative:
 * there is none, or the server must know its column (place_hash_in_row). Not inlined: see
 * handle_in_full. */
__noinline int best_candidate(const struct service *service, __u32 bucket)
{
	__u64 best = RANK_NONE;
	__u32 first, table_key;
	void *table;

	if (!service ||
	    (service->rule.flags & (RULE_TAKES_FLOWS | RULE_IN_ROW)) != RULE_TAKES_FLOWS)
		return -1;
	table_key = table_number(service);
	table = bpf_map_lookup_elem(&tables, &table_key);
	if (!table)
		return -1;
	first = row_start(service, bucket);
	for (__u32 i = 0; i < MAX_CANDIDATES && i < candidates_of(service); i++) {
		__u32 slot = candidate_at(table, first + i);
		const struct load *load = load_at(slot);

		if (load && is_taking(service, slot))
			best = lower_of(best, rank_of(slot, load));
	}
	return best == RANK_NONE ? -1 : (int)(best & RANK_SLOT_MASK);
}

/* Makes the candidate with the lowest score the first server of a list. Only that entry is valid
 * afterwards. Here the lowest bits of a rank are the place in the list, and not the slot. */
static __always_inline void put_best_first(struct segments *segments)
{
	__u64 best = RANK_NONE;
	__u32 place;

	for (__u32 i = 0; i < MAX_CANDIDATES && i < segments->count; i++) {
		const struct load *load = load_at(segments->server[i]);

		if (load)
			best = lower_of(best, rank_of(i, load));
	}
	/* The place goes through memory (the padding). Otherwise the verifier would follow the
	 * ranks of all servers. */
	*(volatile __u8 *)segments->pad = best & (MAX_CANDIDATES - 1);
	place = *(volatile __u8 *)segments->pad & (MAX_CANDIDATES - 1);
	segments->server[0] = segments->server[place];
	take_trial(segments->server[0]);
	segments->columns = segments->columns >> place * COLUMN_BITS & COLUMN_MASK;
}

/* Lists the servers of a row that take new flows, with their columns. Under `infer`, the first one
 * is that with the lowest score. Not inlined: see handle_in_full. */
__noinline int list_takers(const struct service *service, __u32 bucket, struct segments *segments)
{
	if (!service || !segments)
		return 0;
	segments->count = 0;
	segments->columns = 0;
	list_own_row(service, bucket, segments);
	if (places_by(service, PLACEMENT_BIT(PLACEMENT_INFER_ROW)) && segments->count)
		put_best_first(segments);
	return 0;
}

#endif
