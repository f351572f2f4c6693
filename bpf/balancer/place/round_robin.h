/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `round-robin`: each new flow goes to the next server in turn, over all servers of the
 * service (the reference in section VI-B7 of 6LB).
 *
 * The service's candidate table is one cycle of turns: the first candidate of a row has the row's
 * turn, and a server has as many rows as its weight says. A counter names the row of the next turn.
 * So the bucket of a flow does not tell the flow's server, and only persistence knows it. Other
 * packets of unknown flows are handled as under `hash`. If the service has no more servers than a
 * row has candidates, each row names all servers. Then the row of any bucket leads to the flow's
 * server.
 */
#ifndef SEGUE_BALANCER_PLACE_ROUND_ROBIN_H
#define SEGUE_BALANCER_PLACE_ROUND_ROBIN_H

#include "balancer/place/hash.h"

/* How many turns each service has given out, by the service's id. Packets of new flows write here,
 * so it is apart from all that other packets read. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERVICES);
	__type(key, __u32);
	__type(value, __u64);
} turns SEC(".maps");

struct turn_search {
	const struct service *service;
	__u64 *given; /* turns that the service has given out */
	int server;   /* that takes the flow; negative: none so far */
};

/* Takes the next turn. Returns 1 to end the search: the turn's server takes new flows. Otherwise
 * the server loses its turn. A dry run leaves the counter as it is, and looks ahead. */
static long take_turn(__u32 tried, struct turn_search *search)
{
	const struct service *service = search->service;
	__u64 turn = dry_run ? *search->given + tried : __sync_fetch_and_add(search->given, 1);
	__u32 number = candidate_of(service, turn % buckets_of(service), 0);

	if (!is_taking(service, number))
		return 0;
	search->server = number;
	return 1;
}

/* Returns the server whose turn it is. Negative: no server takes new flows, or none of the next
 * 4096 turns is of one that does. Not inlined: see handle_in_full. */
__noinline int next_in_turn(const struct service *service)
{
	struct turn_search search = { .service = service, .server = -1 };
	__u32 id;

	if (!service || !(service->rule.flags & RULE_TAKES_FLOWS))
		return -1;
	id = service->id;
	search.given = bpf_map_lookup_elem(&turns, &id);
	if (!search.given)
		return -1;
	bpf_loop(ROWS_FOR_ONE, take_turn, &search, 0);
	return search.server;
}

#endif
