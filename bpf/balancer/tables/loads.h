/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The loads of servers, as far as this balancer sees them: how many flows each has. The balancer
 * sees only packets from clients, and infers the states of flows from these (HLB, section IV-A).
 */
#ifndef SEGUE_BALANCER_TABLES_LOADS_H
#define SEGUE_BALANCER_TABLES_LOADS_H

#include "balancer/decision.h"
#include "balancer/types.h"

/* The parts of struct load's `flows`: both numbers are in one word, so that one instruction counts
 * a flow's second packet. */
#define LOAD_ESTABLISHED 1ULL
#define LOAD_ANSWERED (1ULL << 32)

/*
 * How many of a server's flows in the state FLOW_NEW count fully. Without a flood a server has
 * fewer, because a flow is new for a round trip only. A flood of SYNs makes many more, for which no
 * server works. Beyond SURE_NEW, every 64 count as one, so that the flood is still spread over all
 * servers.
 */
#define SURE_NEW 16
#define FLOOD_SHIFT 6
/* No server has a billion flows. */
#define MOST_FLOWS (1ULL << 30)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct load);
} loads SEC(".maps");

static __always_inline struct load *load_at(__u32 server)
{
	return bpf_map_lookup_elem(&loads, &server);
}

/* The number of the next flows that go to the server, whatever its price; 0 or less: none. */
static __always_inline __s64 trials_of(const struct load *load)
{
	return *(const volatile __s32 *)&load->trials;
}

/* Uses up a trial of a server that gets a flow. A server with trials gets flows whatever its
 * price. */
static __always_inline void take_trial(__u32 server)
{
	struct load *load = load_at(server);

	if (load && trials_of(load) > 0 && !dry_run)
		__sync_fetch_and_add(&load->trials, -1);
}

static __always_inline __u64 flows_of(const struct load *load)
{
	return *(const volatile __u64 *)&load->flows;
}

/* A number of flows can be below 0 for a moment, if one core counts the end of a flow before
 * another core counts its beginning. It is 0 then: otherwise the server would seem to have billions
 * of flows. */
static __always_inline __u64 not_negative(__s64 number)
{
	__s64 sign = number >> 63;

	/* Otherwise the compiler makes it a branch: the verifier follows twice as many paths. */
	barrier_var(sign);
	return number & ~sign;
}

/* The lower of two numbers below 2^63, without a branch. */
static __always_inline __u64 lower_of(__u64 a, __u64 b)
{
	return a - not_negative(a - b);
}

/* The established flows of a server, from the word `flows`. */
static __always_inline __u64 established_of(__u64 flows)
{
	return not_negative((__s32)flows);
}

/* The number of a server's new flows that count. `flows` is the load's word `flows`. The load's
 * words are not read at the same moment, so the number can miss changes of other cores. If the
 * lower half of `flows` is below 0, it has borrowed 1 from the upper half. */
static __always_inline __u64 new_of(const struct load *load, __u64 flows)
{
	__u32 answered = (flows - (__s32)flows) >> 32;
	__u32 lost = *(const volatile __u32 *)&load->lost;
	__u32 placed = *(const volatile __u32 *)&load->placed;

	return not_negative((__s64)(__s32)(placed - answered - lost) - load->stale);
}

/* The load of a server if it gets one more flow. */
static __always_inline __u64 next_load(const struct load *load)
{
	__u64 flows = flows_of(load), new = new_of(load, flows);
	__u64 next = established_of(flows) + 1;

	next += lower_of(new, SURE_NEW) + (not_negative(new - SURE_NEW) >> FLOOD_SHIFT);
	return lower_of(next, MOST_FLOWS);
}

#endif
