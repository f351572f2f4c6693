/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement: which servers a new flow is offered to. Like persistence it answers
 * with segments, so that what follows need not know who decided.
 */
#ifndef SEGUE_PLACE_H
#define SEGUE_PLACE_H

#include "hash.h"
#include "services.h"
#include "maps.h"
#include "srv6.h"

/* The servers a packet visits, in order of travel. */
struct segments {
	__u32 count;
	enum sid_function function; /* asked of each of them */
	__u32 server[MAX_CANDIDATES];
	const struct server *first; /* server[0] */
};

/* The same on all balancers that share a seed: set at load. */
const volatile __u64 bucket_keys[TUPLE_WORDS + 1];

/* The candidate of a bucket; false when the table does not have it. */
static __always_inline bool bucket_candidate(const struct service *service, __u32 bucket,
					     __u32 choice, __u32 *server)
{
	__u32 table_number = 2 * service->id + service->rule.table;
	__u32 position = bucket * service->rule.candidates + choice;
	__u32 word = position / CANDIDATES_PER_WORD;
	void *table = bpf_map_lookup_elem(&tables, &table_number);
	struct candidates *candidates;

	if (!table)
		return false;
	candidates = bpf_map_lookup_elem(table, &word);
	if (!candidates)
		return false;
	*server = candidates->server[position % CANDIDATES_PER_WORD];
	return true;
}

/* Maps a hash onto 0..buckets-1 without a division (Lemire, "Fast random
 * integer generation in an interval", 2019, section 2). */
static __always_inline __u32 bucket_of(const struct flow_key *flow, __u32 buckets)
{
	__u32 hash = mix(multilinear((const __u32 *)flow, TUPLE_WORDS, bucket_keys));

	return (__u64)hash * buckets >> 32;
}

/* Placement `hash`: the bucket's first candidate takes the flow. */
static __always_inline bool place_hash(const struct flow_key *flow, const struct service *service,
				       struct segments *segments)
{
	__u32 buckets = service->rule.buckets;

	if (!buckets)
		return false;
	segments->count = 1;
	segments->function = SID_DELIVER;
	return bucket_candidate(service, bucket_of(flow, buckets), 0, &segments->server[0]);
}

/* False when the service has no server to place on. */
static __always_inline bool place(const struct flow_key *flow, const struct service *service,
				  struct segments *segments)
{
	bool placed = false;

	switch (placement_of(service)) {
	case PLACEMENT_HASH:
		placed = place_hash(flow, service, segments);
	}
	segments->first = bpf_map_lookup_elem(&servers, &segments->server[0]);
	return placed;
}

#endif
