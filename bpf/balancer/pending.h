/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Half-open flows of placement `hunt`: a server has answered the SYN, and the client
 * has not said anything since. They are kept as flows are (flowtable.h), but apart:
 * SYNs whose sender never comes back displace one another here, and no flow there.
 */
#ifndef SEGUE_BALANCER_PENDING_H
#define SEGUE_BALANCER_PENDING_H

#include "flowtable.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_bucket);
} pending SEC(".maps");

const volatile __u32 pending_bucket_shift; /* 64 less the bits of a bucket's number */

/* The state of an entry whose server may have to yield to another one. */
#define PENDING_CLAIM FLOW_CLOSING

/* Finds the half-open flow of what was looked up in the flow table; a claim is none yet. */
static __always_inline void pending_lookup(const struct flow_slot *flow, struct flow_slot *slot)
{
	__u32 number = flow->place >> pending_bucket_shift;

	slot->place = flow->place;
	slot->signature = flow->signature;
	slot->bucket = bpf_map_lookup_elem(&pending, &number);
	slot->value = 0;
	if (slot->bucket)
		flow_search(slot);
	if (flow_state(slot->value) == PENDING_CLAIM)
		slot->value = 0;
}

static __always_inline void pending_remove(const struct flow_slot *slot)
{
	flow_exchange(slot, slot->value, 0);
}

/* What noting a server comes to where there is no room, or another core was faster. */
#define PENDING_NOBODY -1

static __always_inline bool is_rival(const struct flow_slot *claim, __u64 value)
{
	return flow_is_own(claim, value) && value != claim->value && flow_state(value) != FLOW_FREE;
}

/*
 * The server that a claim to the flow has to yield to because of another entry: that of
 * one that is confirmed, or of the lower of two claims. The higher one is taken away, if
 * it is not confirmed that very moment.
 */
static __always_inline int pending_rival(const struct flow_slot *claim, __u64 *entry)
{
	__u64 value = *(volatile __u64 *)entry;

	if (is_rival(claim, value) && flow_state(value) == PENDING_CLAIM && value > claim->value) {
		__u64 found = __sync_val_compare_and_swap(entry, value, 0);

		value = found == value ? 0 : found;
	}
	return is_rival(claim, value) ? (int)flow_server(value) : PENDING_NOBODY;
}

/*
 * Notes that a server has answered the SYN, and returns the one that has the flow then.
 * Two cores may note two servers, in two entries of the bucket, also of a full one: each
 * first claims one, then looks for others, and confirms what nobody has taken away.
 */
static __always_inline int pending_insert(struct flow_slot *slot, __u32 server)
{
	__u64 now = flow_now();
	__u64 confirmed = flow_value(slot->signature, server, FLOW_NEW, now);

	if (!flow_enter(slot, server, PENDING_CLAIM, now, true))
		return PENDING_NOBODY;
	slot->value = flow_value(slot->signature, server, PENDING_CLAIM, now);
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		int rival = pending_rival(slot, &slot->bucket->entry[i]);

		if (rival != PENDING_NOBODY) {
			pending_remove(slot);
			return rival;
		}
	}
	if (!flow_exchange(slot, slot->value, confirmed))
		return PENDING_NOBODY;
	slot->value = confirmed;
	return server;
}

#endif
