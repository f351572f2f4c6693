/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Orders the candidates of an offer by the loads that they have reported, the least loaded first,
 * and keeps the first few.
 *
 * The older a report is, the less it says. So a server's estimate moves from its last report to the
 * mean of all reports of the service, by half of the difference in each half-life.
 * docs/notes/placement.md has the reasons.
 */
#ifndef SEGUE_BALANCER_PLACE_ORDER_H
#define SEGUE_BALANCER_PLACE_ORDER_H

#include "balancer/tables/candidates.h"
#include "balancer/signal/reports.h"
#include "balancer/segments.h"

/* How many candidates an ordered offer keeps. */
#define ORDERED_CANDIDATES 3

/* The half-life of a report is 2^this jiffies. User space sets it at load, so that the half-life is
 * nearest to 139 ms: ln 2 times the 200 ms of the simulator. */
const volatile __u32 report_half_life_shift;

/* The estimates that come before all others, and behind all others. */
#define LEAST_ESTIMATE 0
#define LARGEST_ESTIMATE ((__u64)MAX_LOAD_VALUE << ESTIMATE_SHIFT)

/* What all estimates for one offer depend on. */
struct estimation {
	__s64 mean; /* of the service's reports */
	__u32 now;  /* jiffies */
	__u32 half_life_shift;
};

/* The age, in 1/256 half-lives, from which on a report has no weight. */
#define OLDEST_AGE (40 << 8)

/*
 * The estimated load of a candidate, in the unit of load_value() << ESTIMATE_SHIFT. A server that
 * does not report its load gets the offers that it would get without reports: those of the rows in
 * which it is the first candidate. Between two half-lives, the weight of a report falls linearly.
 */
static __always_inline __u64 estimate_load(const struct estimation *in, __u32 server, __u32 place)
{
	__u64 heard = *(volatile __u64 *)&report_at(server)->heard;
	__s64 value = heard >> 32;
	__u64 age; /* in 1/256 half-lives */

	if (!value)
		return place ? LARGEST_ESTIMATE : LEAST_ESTIMATE;
	age = (__u64)(in->now - (__u32)heard) << 8 >> in->half_life_shift;
	if (age > OLDEST_AGE)
		age = OLDEST_AGE;
	return in->mean + ((value - in->mean) * (__s64)(512 - (age & 0xff)) >> (9 + (age >> 8)));
}

/* Puts the lower one of two keys first. Without a branch, because the processor would often
 * mispredict it. */
static __always_inline void put_in_order(__u64 *a, __u64 *b)
{
	__u64 difference = *a - *b;
	__u64 negative = (__s64)difference >> 63; /* all bits, or none */

	barrier_var(negative); /* otherwise the compiler makes branches of it */
	negative &= difference;
	*a -= negative;
	*b += negative; /* now a is the higher key */
	difference = *a;
	*a = *b;
	*b = difference;
}

/* A pair is two keys in one word, one in each half. The highest bit of a key is 0. */
#define PAIR_SHIFT 32
#define HIGHEST_BITS 0x8000000080000000ULL

/* Puts the lower key of each half into pair a, and the higher one into pair b. */
static __always_inline void put_pairs_in_order(__u64 *a, __u64 *b)
{
	/* The highest bit of a half stays 1 if the key of a is not lower than that of b. All other
	 * bits of the half follow from it. */
	__u64 exchanged = ((*a | HIGHEST_BITS) - *b) & HIGHEST_BITS;

	exchanged -= exchanged >> (PAIR_SHIFT - 1);
	exchanged &= *a ^ *b;
	*a ^= exchanged;
	*b ^= exchanged;
}

/* Sorts two lists of four keys, one in each half of the pairs, by a sorting network (Knuth, "The
 * Art of Computer Programming", volume 3, section 5.3.4). */
static __always_inline void sort_fours(__u64 pair[4])
{
	put_pairs_in_order(&pair[0], &pair[1]);
	put_pairs_in_order(&pair[2], &pair[3]);
	put_pairs_in_order(&pair[0], &pair[2]);
	put_pairs_in_order(&pair[1], &pair[3]);
	put_pairs_in_order(&pair[1], &pair[2]);
}

/* Merges the first three keys of the two sorted lists of the pairs. The compiler leaves out what
 * only the other keys need. */
static __always_inline void merge_three(const __u64 pair[4], __u64 a[3])
{
	__u64 b[3];

#pragma clang loop unroll(full)
	for (__u32 i = 0; i < 3; i++) {
		a[i] = (__u32)pair[i];
		b[i] = pair[i] >> PAIR_SHIFT;
	}
	put_in_order(&a[0], &b[0]); /* the first */
	put_in_order(&a[1], &b[1]); /* a[1]: the lower one of both lists' second keys */
	put_in_order(&a[1], &b[0]); /* the second */
	put_in_order(&a[2], &b[2]); /* a[2]: the lower one of both lists' third keys */
	put_in_order(&a[2], &b[0]); /* the third: b[0] may be lower than that key */
}

/* A key has a candidate's estimate in its upper bits, and the candidate's place in the list in the
 * lowest ones, to break ties. It has 30 bits. */
#define PLACE_BITS 3
#define PLACE_MASK (MAX_CANDIDATES - 1)

/* Reads what the estimates for an offer depend on. */
static __always_inline struct estimation begin_estimation(const struct service *service)
{
	__u32 id = service->id;
	const struct service_reports *all = bpf_map_lookup_elem(&service_reports, &id);
	struct estimation in = {
		.mean = all ? *(volatile __u64 *)&all->mean : 0,
		.now = bpf_jiffies64(),
		.half_life_shift = report_half_life_shift,
	};

	return in;
}

/* Notes the mean and the number of servers that are ordered. */
static __always_inline void note_order(const struct estimation *in, const struct segments *segments)
{
	if (!dry_run)
		return;
	decision.placement.mean = in->mean;
	decision.placement.ordered = segments->count;
}

/* Notes the server in a place of the list, and its estimate. */
static __always_inline void note_estimate(const struct segments *segments, __u32 place, __u64 key)
{
	if (!dry_run)
		return;
	decision.placement.row[place] = segments->server[place];
	decision.placement.estimate[place] = key >> PLACE_BITS;
}

/* The key of the candidate in a place of the list. */
static __always_inline __u64 key_of(const struct estimation *in, const struct segments *segments,
				    __u32 place)
{
	__u64 key = estimate_load(in, segments->server[place], place) << PLACE_BITS | place;

	note_estimate(segments, place, key);
	return key;
}

/* Keeps the servers with the lowest keys, in the order of the keys. */
static __always_inline void keep_least(const __u64 key[ORDERED_CANDIDATES],
				       struct segments *segments)
{
	__u16 server[ORDERED_CANDIDATES];
	__u32 columns = 0;

#pragma clang loop unroll(full)
	for (__u32 i = 0; i < ORDERED_CANDIDATES; i++) {
		__u32 place = key[i] & PLACE_MASK;

		server[i] = segments->server[place];
		columns |= (segments->columns >> place * COLUMN_BITS & COLUMN_MASK)
			   << i * COLUMN_BITS;
	}
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < ORDERED_CANDIDATES; i++)
		segments->server[i] = server[i];
	segments->columns = columns;
	if (segments->count > ORDERED_CANDIDATES)
		segments->count = ORDERED_CANDIDATES;
}

/* Orders the listed candidates by their estimates, and keeps the first ORDERED_CANDIDATES. Not
 * inlined: see handle_in_full. */
__noinline int order_by_reports(const struct service *service, struct segments *segments)
{
	__u64 pair[MAX_CANDIDATES / 2], key[ORDERED_CANDIDATES];
	struct estimation in;

	if (!service || !segments)
		return 0;
	in = begin_estimation(service);
	note_order(&in, segments);
	/* No server has this slot, so it comes behind all candidates. */
	for (__u32 i = segments->count; i < MAX_CANDIDATES; i++)
		*(volatile __u16 *)&segments->server[i] = NO_SERVER;
#pragma clang loop unroll(full)
	for (__u32 i = 0; i < MAX_CANDIDATES / 2; i++)
		pair[i] = key_of(&in, segments, i) | key_of(&in, segments, i + MAX_CANDIDATES / 2)
							     << PAIR_SHIFT;
	sort_fours(pair);
	merge_three(pair, key);
	keep_least(key, segments);
	return 0;
}

/* Makes room for one more server in a list of at most `most` servers: drops the last server if the
 * list is full. */
static __always_inline void leave_one_free(struct segments *segments, __u32 most)
{
	if (segments->count < most)
		return;
	segments->count = most - 1;
	segments->columns &= (1U << (most - 1) * COLUMN_BITS) - 1;
}

/*
 * Gives the last place of an offer to the server that has last reported free capacity, if it is not
 * among the servers of the offer. It may be in the bucket's row, but its column is not looked up.
 * Not inlined: see handle_in_full.
 */
__noinline int offer_spare(const struct service *service, struct segments *segments)
{
	const struct service_reports *all;
	__u64 spares;
	__u32 id;

	if (!service || !segments)
		return 0;
	id = service->id;
	all = bpf_map_lookup_elem(&service_reports, &id);
	spares = all ? *(volatile __u64 *)&all->spares : 0;
	for (__u32 i = 0; i < SPARES; i++) {
		__u32 number = spare_at(spares, i);

		if (number == NO_SERVER)
			return 0;
		if (!is_taking(service, number) || !is_reachable(server_at(number)) ||
		    is_listed(segments, number))
			continue;
		leave_one_free(segments, ORDERED_CANDIDATES);
		append_candidate(segments, number, NO_COLUMN);
		return 0;
	}
	return 0;
}

#endif
