/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The loads of servers, as far as this balancer sees them: how many flows each has. Only packets
 * from clients are seen, so the states of flows follow from these (HLB, section IV-A).
 */
#ifndef SEGUE_BALANCER_LOADS_H
#define SEGUE_BALANCER_LOADS_H

#include "types.h"

/* The parts of struct load's `flows`: both numbers are in one word, so that one instruction moves a
 * flow from one to the other. */
#define LOAD_ESTABLISHED 1ULL
#define LOAD_NEW (1ULL << 32)

/*
 * So many flows in the state FLOW_NEW count fully. Without a flood a server has fewer, because each
 * lasts a round trip. A flood of SYNs has many more, for which no server works. Of these, 64 count
 * as one, so that the flood is still spread over all servers.
 */
#define SURE_NEW 16
#define FLOOD_SHIFT 6
/* No server has a billion flows. */
#define MOST_FLOWS (1ULL << 30)
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: as servers */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct load);
} loads SEC(".maps");

static __always_inline struct load *load_at(__u32 server)
{
	return bpf_map_lookup_elem(&loads, &server);
}

/* The flows of a server (struct load) that count fully. */
static __always_inline __u64 sure_flows(__u64 flows)
{
	__u64 new = flows >> 32;

	return (__u32)flows + (new < SURE_NEW ? new : SURE_NEW);
}

/* The load of a server with these flows and one more. */
static __always_inline __u64 next_load(__u64 flows)
{
	__u64 new = flows >> 32, flood = new > SURE_NEW ? new - SURE_NEW : 0;
	__u64 next = sure_flows(flows) + (flood >> FLOOD_SHIFT) + 1;

	return next < MOST_FLOWS ? next : MOST_FLOWS;
}

/* Adds to the flows of a server. Returns whether others of its flows count fully afterwards: flows of
 * a flood change nothing. */
static __always_inline bool add_load(__u32 server, __u64 more)
{
	struct load *load = load_at(server);
	__u64 before;

	if (!load)
		return false;
	before = __sync_fetch_and_add(&load->flows, more);
	return sure_flows(before) != sure_flows(before + more);
}

#endif
