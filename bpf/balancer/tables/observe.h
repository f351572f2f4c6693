/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the changes of flows tell about their servers. From this, user space infers how many flows
 * each server can serve at once, and whether it serves any (internal/infer).
 */
#ifndef SEGUE_BALANCER_TABLES_OBSERVE_H
#define SEGUE_BALANCER_TABLES_OBSERVE_H

#include "balancer/tables/durations.h"
#include "balancer/tables/ranking.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct ends);
} ends SEC(".maps");

/* Counts the end of a flow. `flows` is how many established flows the server had until then; 0: the
 * flow was not established. */
static __always_inline void count_end(__u32 slot, __u64 flows)
{
	struct ends *counts = bpf_map_lookup_elem(&ends, &slot);

	if (counts)
		__sync_fetch_and_add(&counts->by_flows[flows < MOST_COUNTED ? flows : MOST_COUNTED],
				     1);
}

/* Takes note of a flow that has changed its state. Its server has a place in a ranking. `flows` is
 * the word `flows` of the load before the change. */
static __always_inline void observe(__u64 entry, const struct load *load, __u64 flows,
				    enum flow_state from, enum flow_state to)
{
	if (load->timing == TIMING_ENDS && to == FLOW_ESTABLISHED && from != FLOW_SILENT)
		begin_duration(entry);
	if (load->timing == TIMING_ENDS && is_established(from) && has_ended(to))
		end_duration(entry);
	/* The server has not served a flow whose second packet was the FIN. So that flow does not
	 * tell how many flows the server can serve. Otherwise the ending flow itself counts, even
	 * if the number of flows is too low for a moment. */
	if (from == FLOW_NEW && has_ended(to))
		count_end(entry_server(entry), 0);
	else if (from == FLOW_ESTABLISHED && has_ended(to))
		count_end(entry_server(entry), established_of(flows - LOAD_ESTABLISHED) + 1);
}

/* Whether a server has less to do after a flow has changed its state: the flow is no longer
 * established, or it was new and has ended without becoming established. With SURE_NEW or more new
 * flows, as in a flood, the end of a new flow does not count. */
static __always_inline bool has_less(const struct load *load, enum flow_state from,
				     enum flow_state to)
{
	if (from == FLOW_ESTABLISHED)
		return to != FLOW_ESTABLISHED;
	return from == FLOW_NEW && to != FLOW_NEW && to != FLOW_ESTABLISHED &&
	       new_of(load, flows_of(load)) < SURE_NEW;
}

/* Lowers the rank of a server that has lost a flow. */
static __always_inline void lower_rank_of(__u32 slot, const struct load *load)
{
	const struct server *server = server_at(slot);

	if (server->rank)
		lower_rank(ranking_of(server->service), server->rank - 1,
			   present_rank(server, slot, load));
}

/* Counts a change of an entry in the loads of its servers, old and new, and observes it. */
__noinline int note_change(__u64 old, __u64 new)
{
	/* A removed entry does not stay, even if its signature and its slot are 0. */
	bool stays = new && !is_replaced(old, new);
	enum flow_state from = entry_state(old), to = entry_state(new);
	struct load *load = load_at(entry_server(new)), *former = load;
	__u64 flows;

	if (!load)
		return 0;
	flows = new ? count_states(load, stays ? from : FLOW_FREE, to) : 0;
	if (has_features(PLACEMENTS_RANKING) && stays && server_at(entry_server(new))->rank)
		observe(new, load, flows, from, to);
	if (!stays) {
		to = FLOW_FREE;
		former = load_at(entry_server(old));
		if (!old || !former)
			return 0;
		count_states(former, from, to);
	}
	if (has_features(PLACEMENTS_RANKING) && has_less(former, from, to))
		lower_rank_of(entry_server(old), former);
	return 0;
}

#endif
