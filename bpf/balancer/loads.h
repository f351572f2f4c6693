/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The loads of servers, as far as this balancer sees them: how many flows each has. Only packets
 * from clients are seen, so the states of flows follow from these (HLB, section IV-A).
 */
#ifndef SEGUE_BALANCER_LOADS_H
#define SEGUE_BALANCER_LOADS_H

#include "decision.h"
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

/* Whether the next flow goes to the server, whatever its price. */
static __always_inline bool is_tried(const struct load *load)
{
	return *(const volatile __s32 *)&load->trials > 0;
}

/* Takes a trial of a server that gets a flow. */
static __always_inline void take_trial(__u32 server)
{
	struct load *load = load_at(server);

	if (load && is_tried(load) && !dry_run)
		__sync_fetch_and_add(&load->trials, -1);
}

/* The parts of a server's flows (struct load). A number can be below 0 for a moment, if one core
 * counts the end of a flow before another core counts its beginning. It is 0 then: otherwise the
 * server would seem to have billions of flows. */
static __always_inline __u64 established_of(__u64 flows)
{
	__s64 number = (__s32)flows;

	return number & ~(number >> 63);
}

static __always_inline __u64 new_of(__u64 flows)
{
	__s64 number = (__s64)(flows - (__s32)flows) >> 32;

	return number & ~(number >> 63);
}

/* The new flows that count, of a server with these flows. */
static __always_inline __u64 fresh_flows(const struct load *load, __u64 flows)
{
	__u64 new = new_of(flows), stale = load->stale;

	return new > stale ? new - stale : 0;
}

/* The flows that count fully, of a server with these flows. */
static __always_inline __u64 sure_flows(const struct load *load, __u64 flows)
{
	__u64 new = fresh_flows(load, flows);

	return established_of(flows) + (new < SURE_NEW ? new : SURE_NEW);
}

/* The load of a server with these flows and one more. */
static __always_inline __u64 next_load(const struct load *load, __u64 flows)
{
	__u64 new = fresh_flows(load, flows), flood = new > SURE_NEW ? new - SURE_NEW : 0;
	__u64 next = sure_flows(load, flows) + (flood >> FLOOD_SHIFT) + 1;

	return next < MOST_FLOWS ? next : MOST_FLOWS;
}

/* Adds to the flows of a server. Returns whether others of its flows count fully afterwards:
 * flows of a flood change nothing. */
static __always_inline bool add_load(__u32 server, __u64 more)
{
	struct load *load = load_at(server);
	__u64 before;

	if (!load)
		return false;
	before = __sync_fetch_and_add(&load->flows, more);
	return sure_flows(load, before) != sure_flows(load, before + more);
}

#endif
