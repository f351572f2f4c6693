/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `infer`: each new flow goes to the server with the lowest score, over all servers of
 * the service, or over the candidates of the flow's bucket (HLB, section IV-B3; ranking.h). In the
 * first case the bucket of a flow does not tell the flow's server, and only persistence knows it.
 * Packets of other unknown flows are handled as under `hash`.
 */
#ifndef SEGUE_BALANCER_PLACE_INFER_H
#define SEGUE_BALANCER_PLACE_INFER_H

#include "observe.h"
#include "place_hash.h"

/* How many ranks a packet corrects before it takes the last server that it has found. Each flow
 * that was placed since makes one rank outdated, so most packets correct one. */
#define MOST_CORRECTIONS 8

/* Returns the server with the lowest score that takes new flows; negative: there is none, or the
 * lowest ranks are of servers that take none. Not inlined: see handle_in_full. */
__noinline int best_server(const struct service *service)
{
	const struct ranking *ranking;
	int best = -1;
	__u32 top;

	if (!service || !(service->rule.flags & RULE_TAKES_FLOWS))
		return -1;
	ranking = ranking_of(service->id);
	if (!ranking || !ranking->servers)
		return -1;
	top = top_of(ranking);
	for (int i = 0; i < MOST_CORRECTIONS; i++) {
		const struct rank_line *line = rank_line_at(top);
		__u64 rank = line ? lowest_of(line) : RANK_NONE, now = RANK_NONE;
		__u32 slot = rank & RANK_SLOT_MASK;
		const struct server *server = server_at(slot);
		const struct load *load = load_at(slot);

		if (rank == RANK_NONE || !load)
			return best;
		if (takes_flows_of(server, service)) {
			best = slot;
			now = rank_of(slot, load);
		}
		/* A dry run changes nothing. User space corrects all ranks before it. */
		if (now == rank || dry_run || !serves(server, service) || !server->rank)
			return best;
		set_rank(ranking, server->rank - 1, now, false);
	}
	return best;
}

/* Returns the candidate of the flow's bucket with the lowest score that takes new flows; negative:
 * there is none. Not inlined: see handle_in_full. */
__noinline int best_candidate(const struct service *service, __u32 bucket)
{
	__u64 best = RANK_NONE;
	__u32 first, table_key;
	void *table;

	if (!service || !(service->rule.flags & RULE_TAKES_FLOWS))
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
			best = lower(best, rank_of(slot, load));
	}
	return best == RANK_NONE ? -1 : (int)(best & RANK_SLOT_MASK);
}

#endif
