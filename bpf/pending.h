/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Half-open flows of placement `hunt`: a server has answered the SYN, and the client
 * has not said anything since. They are kept as flows are (flowtable.h), but apart:
 * SYNs whose sender never comes back displace one another here, and no flow there.
 */
#ifndef SEGUE_PENDING_H
#define SEGUE_PENDING_H

#include "flowtable.h"

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_bucket);
} pending SEC(".maps");

const volatile __u32 pending_bucket_shift; /* 32 less the bits of a bucket's number */

/* Finds the half-open flow of what was looked up in the flow table. */
static __always_inline void pending_lookup(const struct flow_slot *flow, struct flow_slot *slot)
{
	__u32 number = (__u64)flow->place >> pending_bucket_shift;

	slot->place = flow->place;
	slot->signature = flow->signature;
	slot->bucket = bpf_map_lookup_elem(&pending, &number);
	slot->value = 0;
	if (slot->bucket)
		flow_search(slot);
}

/* Notes that a server has answered the SYN; false: there was no room. */
static __always_inline bool pending_insert(struct flow_slot *slot, __u32 server)
{
	return flow_insert(slot, server, FLOW_NEW, flow_now());
}

static __always_inline void pending_remove(const struct flow_slot *slot)
{
	flow_exchange(slot, slot->value, 0);
}

#endif
