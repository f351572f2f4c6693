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

static __always_inline void add_load(__u32 server, __u64 more)
{
	struct load *load = load_at(server);

	if (load)
		__sync_fetch_and_add(&load->flows, more);
}

#endif
