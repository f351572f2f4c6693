/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Half-open flows: a server has answered the SYN, and no packet of the client has come since. Their
 * table has the format of the flow table (flowtable.h), but is separate: the half-open flows of a
 * flood evict one another, and no entry of the flow table.
 */
#ifndef SEGUE_BALANCER_TABLES_HALFOPEN_H
#define SEGUE_BALANCER_TABLES_HALFOPEN_H

#include "balancer/tables/flowtable.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_bucket);
} half_open SEC(".maps");

const volatile __u32 half_open_bucket_shift; /* 64 less the bits of a bucket's number */

/* The state of a claim: an entry whose server may have to yield to another server. */
#define HALF_OPEN_CLAIM FLOW_CLOSED

static struct flow_bucket half_open_copy;

/* Finds the half-open entry of a flow, after flow_lookup(). Claims do not count. */
static __always_inline void half_open_lookup(const struct flow *flow, struct flow *half_open_flow)
{
	__u32 number = flow->place >> half_open_bucket_shift;

	half_open_flow->place = flow->place;
	half_open_flow->signature = flow->signature;
	half_open_flow->bucket =
		changeable(bpf_map_lookup_elem(&half_open, &number), &half_open_copy);
	flow_search(half_open_flow);
	if (entry_state(half_open_flow->value) == HALF_OPEN_CLAIM)
		half_open_flow->value = 0;
}

static __always_inline void half_open_remove(const struct flow *flow)
{
	flow_transition(flow, flow->value, 0);
}

/* In place of a server: no entry could be made, for want of room or because another core was
 * faster. */
#define HALF_OPEN_NOBODY -1

/* Whether a value is another entry of the claim's flow. */
static __always_inline bool is_rival(const struct flow *claim, __u64 value)
{
	return value && entry_is_own(claim, value) && value != claim->value;
}

/*
 * The server that a claim has to yield to because of this entry of the bucket, or HALF_OPEN_NOBODY
 * if it need not yield. The claim yields to another entry of its flow if that entry is confirmed,
 * or is a lower claim. A higher claim is removed here, unless it is confirmed at that very moment.
 */
static __always_inline int half_open_rival(const struct flow *claim, __u64 *entry)
{
	__u64 value = *(volatile __u64 *)entry;

	/* The load of a server counts no claims, so this change needs no count. */
	if (is_rival(claim, value) && entry_state(value) == HALF_OPEN_CLAIM && value > claim->value)
		value = entry_swap(entry, value, 0) ? 0 : *(volatile __u64 *)entry;
	return is_rival(claim, value) ? (int)entry_server(value) : HALF_OPEN_NOBODY;
}

/*
 * Enters the server that has answered the SYN, and returns the server that has the flow then. Two
 * cores may enter two servers at the same time, in two entries of the bucket. So each core first
 * makes a claim, then looks for other entries, and confirms its claim if nobody has removed it.
 * HALF_OPEN_NOBODY: the bucket has no room, or another core has removed the claim.
 */
static __always_inline int half_open_insert(struct flow *flow, __u32 server)
{
	__u64 now = flow_now();
	__u64 confirmed = entry_value(flow->signature, server, FLOW_NEW, now);

	if (!flow_enter(flow, server, HALF_OPEN_CLAIM, now, true))
		return HALF_OPEN_NOBODY;
	flow->value = entry_value(flow->signature, server, HALF_OPEN_CLAIM, now);
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		int rival = half_open_rival(flow, &flow->bucket->entry[i]);

		if (rival != HALF_OPEN_NOBODY) {
			half_open_remove(flow);
			return rival;
		}
	}
	if (!flow_transition(flow, flow->value, confirmed))
		return HALF_OPEN_NOBODY;
	flow->value = confirmed;
	return server;
}

#endif
