/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement: which servers a new flow is offered to. Like persistence it answers
 * with segments, so that what follows need not know who decided.
 */
#ifndef SEGUE_BALANCER_PLACE_H
#define SEGUE_BALANCER_PLACE_H

#include "hash.h"
#include "services.h"
#include "maps.h"
#include "net/srv6.h"

/* The servers a packet visits, in order of travel. */
struct segments {
	__u32 count;
	__u32 server[MAX_CANDIDATES];
	/* SID_LOW of what is asked of the first, and of the others and the last, if there are any.
	 * Of the first 0: its known_sid, loaded no sooner than it is written, that is. */
	__u32 first_sid, sid, last_sid;
	const struct server *first_server; /* server[0] */
};

static __always_inline bool hunts(const struct service *service)
{
	return placement_of(service) != PLACEMENT_HASH;
}

/* A single server is the last one. */
static __always_inline void ask(struct segments *segments, enum sid_function each,
				enum sid_function last)
{
	segments->first_sid = segments->count > 1 ? SID_LOW(each) : SID_LOW(last);
	segments->sid = SID_LOW(each);
	segments->last_sid = SID_LOW(last);
}

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
	__u32 table_number = 2 * service->id + ((service->rule.table & 1) ^ which);
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

/* Placement `hash`: the bucket's first candidate takes the flow. False when the service
 * has no server to place on. */
static __always_inline bool place(const struct flow_key *flow, const struct service *service,
				  struct segments *segments)
{
	__u32 buckets = service->rule.buckets;

	if (!buckets)
		return false;
	segments->count = 1;
	ask(segments, SID_DELIVER, SID_DELIVER);
	if (!bucket_candidate(service, TABLE_PRESENT, bucket_of(flow, buckets), 0,
			      &segments->server[0]))
		return false;
	segments->first_server = server_at(segments->server[0]);
	return true;
}

#endif
