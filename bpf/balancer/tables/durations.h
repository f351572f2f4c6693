/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How long the flows of a server last, from the first packet after the SYN to the end: a sample in
 * a reservoir (HLB, section IV-B1 and algorithm 1).
 *
 * A start time would make every entry of the flow table larger, so only some flows are timed. Their
 * starts are in a small table, with one place for each flow. A flow is timed if its place is free
 * when it begins. Whether a place is free does not depend on how long the flow will last, so the
 * sample is not biased. A flow that leaves the flow table without an end leaves its start behind.
 * So a start may be replaced by the same flow when it begins again, and by any flow after
 * MAX_TIMED. A flow that lasts longer is missing in the sample if another flow has taken its place.
 *
 * Algorithm 1 has two errors. Its index is a random number modulo the number of servers, and not
 * modulo the size of the buffer. It also takes a duration from each packet, so that a flow counts
 * as often as it has packets, with the times since its start. Here each timed flow gives one
 * duration.
 */
#ifndef SEGUE_BALANCER_TABLES_DURATIONS_H
#define SEGUE_BALANCER_TABLES_DURATIONS_H

#include "balancer/tables/flowtable.h"

/* The time is in microseconds, and begins with the boot. */
#define START_TIME_BITS 46
#define START_TIME_MASK ((1ULL << START_TIME_BITS) - 1)
#define MAX_TIMED (1ULL << 28) /* about four minutes */

/* The part of a signature that the place does not tell, and the time of the start; 0: free. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two, at most 65536 */
	__type(key, __u32);
	__type(value, __u64);
} starts SEC(".maps");

const volatile __u32 start_mask; /* the number of places, less 1 */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct reservoir);
} reservoirs SEC(".maps");

/* The place for the start of an entry's flow. */
static __always_inline __u64 *start_of(__u64 entry)
{
	__u32 place = entry >> FLOW_SIGNATURE_SHIFT & start_mask;

	return bpf_map_lookup_elem(&starts, &place);
}

/* The part of the signature that is in an element: the upper 18 bits. */
static __always_inline __u64 start_tag(__u64 entry)
{
	return entry & ~START_TIME_MASK;
}

static __always_inline __u64 microseconds(void)
{
	return bpf_ktime_get_boot_ns() / 1000 & START_TIME_MASK;
}

/* Begins to time a flow, if its place is free, or has an earlier start of the flow, or a start of
 * any flow that is older than MAX_TIMED. */
static __always_inline void begin_duration(__u64 entry)
{
	__u64 *start = start_of(entry), now = microseconds(), other;

	if (!start)
		return;
	other = *(volatile __u64 *)start;
	if (!other || start_tag(other) == start_tag(entry) ||
	    now - (other & START_TIME_MASK) > MAX_TIMED)
		*(volatile __u64 *)start = start_tag(entry) | now;
}

/* Puts a duration into the sample. If the sample is full, it replaces a random one. */
static __always_inline void add_duration(struct reservoir *to, __u64 duration)
{
	__u32 count = __sync_fetch_and_add(&to->count, 1);
	__u32 place = count < RESERVOIR_SIZE ? count : bpf_get_prandom_u32();

	to->duration[place & (RESERVOIR_SIZE - 1)] = duration < ~0U ? duration : ~0U;
}

/* Ends a flow, and puts its duration into the sample if it was timed. */
static __always_inline void end_duration(__u64 entry)
{
	__u64 *start = start_of(entry), value;
	__u32 slot = entry_server(entry);
	struct reservoir *reservoir;

	if (!start)
		return;
	value = *(volatile __u64 *)start;
	if (!value || start_tag(value) != start_tag(entry))
		return;
	*(volatile __u64 *)start = 0;
	reservoir = bpf_map_lookup_elem(&reservoirs, &slot);
	if (reservoir)
		add_duration(reservoir, microseconds() - (value & START_TIME_MASK));
}

#endif
