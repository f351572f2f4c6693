/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How long the flows of a server last: a sample in a reservoir (HLB, section IV-B1, algorithm 1).
 * There are two ways to fill the reservoir (enum timing):
 *
 *	- TIMING_ENDS: each timed flow gives one duration, from the first packet after the SYN to
 *	  the end;
 *	- TIMING_PACKETS: as algorithm 1 of HLB. Each packet of a timed flow that is established
 *	  gives one duration, from the SYN to the packet, and the duration takes a random place. The
 *	  index of algorithm 1 is a random number modulo the number of servers, which is an error:
 *	  here it is modulo the size of the buffer.
 *
 * A start time would make every entry of the flow table larger, so only some flows are timed. Their
 * starts are in a small table, with one place for each flow. A flow is timed if its place is free
 * when it begins. Whether a place is free does not depend on how long the flow will last, so the
 * sample is not biased. A flow that leaves the flow table without an end leaves its start behind.
 * So a start may be replaced by the same flow when it begins again, and by any flow after
 * MAX_TIMED. A flow that lasts longer is missing in the sample if another flow has taken its place.
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

/* Whether the durations of a server's flows are sampled by each packet. */
static __always_inline bool times_packets(__u32 slot)
{
	const struct load *load = load_at(slot);

	return load && load->timing == TIMING_PACKETS;
}

/* Begins to time a flow that was entered for a SYN (algorithm 1, lines 11 to 13). Not inlined: see
 * handle_in_full. */
__noinline int time_first_packet(__u64 signature, __u32 slot)
{
	if (times_packets(slot) && !dry_run)
		begin_duration(signature);
	return 0;
}

/* Puts a duration into a random place of a reservoir that was full of zeros (line 20). */
static __always_inline void register_duration(__u32 slot, __u64 duration)
{
	struct reservoir *to = bpf_map_lookup_elem(&reservoirs, &slot);
	__u32 place = bpf_get_prandom_u32();

	if (!to)
		return;
	to->duration[place & (RESERVOIR_SIZE - 1)] = duration < ~0U ? duration : ~0U;
	*(volatile __u32 *)&to->count = RESERVOIR_SIZE;
}

/*
 * Handles a later packet of a flow (lines 11 to 29). `entry` is the flow's entry before the packet.
 * Only an established flow gives a duration, and its last packet gives one, too. A flow that was
 * silent for so long that it does not count is not timed any more (section IV-A1: the timeout
 * evicts the connection). Not inlined: see handle_in_full.
 */
__noinline int time_packet(__u64 entry, __u32 event)
{
	enum flow_state state = entry_state(entry);
	__u32 slot = entry_server(entry);
	__u64 *start = start_of(entry), value;

	if (!times_packets(slot) || !start || dry_run)
		return 0;
	if (event == FLOW_OPENS) {
		if (has_ended(state))
			begin_duration(entry);
		return 0;
	}
	value = *(volatile __u64 *)start;
	if (!value || start_tag(value) != start_tag(entry))
		return 0;
	if (state == FLOW_ESTABLISHED)
		register_duration(slot, microseconds() - (value & START_TIME_MASK));
	if (event == FLOW_ENDS || event == FLOW_RESETS || state == FLOW_SILENT)
		*(volatile __u64 *)start = 0;
	return 0;
}

#endif
