/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Tables of candidates: which servers a flow's bucket names.
 */
#ifndef SEGUE_BALANCER_CANDIDATES_H
#define SEGUE_BALANCER_CANDIDATES_H

#include "hash.h"
#include "maps.h"
#include "services.h"

/* The same on all balancers that share a seed: set at load. */
const volatile __u64 bucket_keys[TUPLE_WORDS + 1];

/* A service's table of candidates, or the one that it had before. */
enum table {
	TABLE_PRESENT,
	TABLE_FORMER,
};

/* The candidate of a bucket; false when the table does not have it. */
static __always_inline bool bucket_candidate(const struct service *service, enum table which,
					     __u32 bucket, __u32 choice, __u32 *server)
{
	__u32 table_number = 2 * service->id + ((service->rule.flags & RULE_TABLE) ^ which);
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
	__u32 hash = mix(multilinear((const __u32 *)flow, TUPLE_WORDS, bucket_keys) >> 32);

	return (__u64)hash * buckets >> 32;
}

#endif
