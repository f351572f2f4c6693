/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the changes of flows tell about their servers. User space infers from it how many flows each
 * server can serve at once, and whether it serves any (internal/infer).
 */
#ifndef SEGUE_BALANCER_OBSERVE_H
#define SEGUE_BALANCER_OBSERVE_H

#include "durations.h"
#include "ranking.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: as servers */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct ends);
} ends SEC(".maps");

/* Counts the end of a flow of a server that had so many established flows before; 0: the flow was
 * not established. */
static __always_inline void count_end(__u32 slot, __u64 flows)
{
	struct ends *of = bpf_map_lookup_elem(&ends, &slot);

	if (of)
		__sync_fetch_and_add(&of->by_flows[flows < MOST_COUNTED ? flows : MOST_COUNTED], 1);
}

/* Whether a flow in this state counts as a load of its server. */
static __always_inline bool is_load(enum flow_state state)
{
	return state == FLOW_NEW || state == FLOW_ESTABLISHED;
}

/* Whether a change gives an entry to another flow, or a flow to another server. */
static __always_inline bool is_replaced(__u64 old, __u64 new)
{
	return (old ^ new) >> FLOW_SERVER_SHIFT;
}

/* Takes note of a flow that has changed its state, or that was placed on a server of a ranking. */
static __always_inline void observe(__u64 old, __u64 new)
{
	enum flow_state from = is_replaced(old, new) ? FLOW_FREE : entry_state(old);
	enum flow_state to = entry_state(new);
	__u32 slot = entry_server(new);
	struct load *load = load_at(slot);

	if (!load)
		return;
	if (to == FLOW_NEW && from != FLOW_NEW)
		__sync_fetch_and_add(&load->placed, 1);
	else if (from == FLOW_NEW && to != FLOW_NEW)
		__sync_fetch_and_add(&load->answered, 1);
	if (load->is_timed && from == FLOW_NEW && to == FLOW_ESTABLISHED)
		begin_duration(new);
	if (load->is_timed && is_established(from) && to == FLOW_CLOSING)
		end_duration(new);
	/* If a flood has forged sources, the hosts there reset what they did not open. The
	 * server has not served these flows, so they do not tell how many it can serve. */
	if (from == FLOW_NEW && to == FLOW_CLOSING)
		count_end(slot, 0);
	else if (from == FLOW_ESTABLISHED && !is_load(to))
		count_end(slot, established_of(*(const volatile __u64 *)&load->flows) + 1);
}

/* Lowers the rank of a server that has lost a flow. */
static __always_inline void lower_rank_of(__u32 slot)
{
	const struct server *server = server_at(slot);
	const struct load *load = load_at(slot);

	if (server->rank && load)
		lower_rank(ranking_of(server->service), server->rank - 1,
			   present_rank(server, slot, load));
}

__noinline int note_change(__u64 old, __u64 new)
{
	bool has_less = count_change(old, new);

	if (server_at(entry_server(new))->rank)
		observe(old, new);
	if (has_less)
		lower_rank_of(entry_server(old));
	return 0;
}

#endif
