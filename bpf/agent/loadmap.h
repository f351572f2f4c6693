/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Loads of the moment: an application maps a BPF array into its memory, and counts there what it is
 * busy with. The program reads the counts when a connection is offered. The layout is that of the
 * file of load reports (docs/operate/load-sources.md, "The file").
 */
#ifndef SEGUE_AGENT_LOADMAP_H
#define SEGUE_AGENT_LOADMAP_H

#include "service.h"

#define LOAD_SLOTS 504
#define SLOTS_PER_LINE 8 /* a cache line */

/* The value of an application's map. */
struct load_page {
	__u8 magic[8];
	__u32 version;
	__u32 used;	/* no process has used a slot from this one on */
	__u32 capacity; /* of all processes together; 0: the sum of the slots */
	__u8 unused[44];
	__u64 slots[LOAD_SLOTS]; /* capacity << 32 | busy, for each process */
};

struct load_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct load_page));
};

/* The maps of applications. User space enters a map when it has opened the map's pin, and removes
 * it when no process reports. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__array(values, struct load_map);
} load_maps SEC(".maps");

/* Adds up the slots: the sum of the capacities in the upper half, of the busy numbers in the lower
 * one. */
static __always_inline __u64 sum_of_slots(const volatile struct load_page *page)
{
	__u32 used = page->used;
	__u64 sum = 0;

	for (__u32 i = 0; i < LOAD_SLOTS && i < used; i += SLOTS_PER_LINE) {
#pragma unroll
		for (__u32 j = 0; j < SLOTS_PER_LINE; j++)
			sum += page->slots[i + j];
	}
	return sum;
}

/* Reads the load that an application keeps in its map. False if no process reports. Not inlined:
 * the verifier walks it once. */
__noinline int read_load_map(const struct service_key *service, struct load *load)
{
	const volatile struct load_page *page;
	struct service_key key;
	__u32 first = 0, shared;
	void *map;
	__u64 sum;

	if (!service || !load)
		return false;
	key = *service; /* Linux 6.1 takes no key from a parameter of a global function */
	map = bpf_map_lookup_elem(&load_maps, &key);
	if (!map)
		return false;
	page = bpf_map_lookup_elem(map, &first);
	if (!page)
		return false;
	sum = sum_of_slots(page);
	shared = page->capacity;
	load->busy = sum;
	load->capacity = shared ? shared : sum >> 32;
	return sum >> 32 != 0;
}

/* A question about the load in a service's map. User space passes it in place of a frame. */
struct load_query {
	struct service_key service; /* set by user space; the program sets all other fields */
	__u32 busy;
	__u32 capacity;
	__u32 is_known;
};

static __always_inline void answer_load_query(struct load_query *query)
{
	struct service_key service = query->service;
	struct load load = {};

	query->is_known = read_load_map(&service, &load);
	query->busy = load.busy;
	query->capacity = load.capacity;
}

#endif
