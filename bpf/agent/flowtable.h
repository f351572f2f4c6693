/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The agent's flow table: set-associative, with eight entries of two words in each bucket. All
 * cores share it without locks.
 *
 *      63                          30 29                    0
 *     +------------------------------+-----------------------+
 *     |          signature           |         check         |  identity
 *     +------------------------------+-----------------------+
 *      63          32 31     22 21 19 18    6    5     4    3   2    0
 *     +--------------+---------+-----+-------+-------+----+-----+-----+
 *     |    since     | balancer|free | first |reports|told|encap|state|  content
 *     +--------------+---------+-----+-------+-------+----+-----+-----+
 *
 * The bucket's number and the signature come from independent hashes. In a bucket, a flow is
 * mistaken for another one with a probability of at most 8 / 2^33 (docs/understand/flow-table.md,
 * "Collisions").
 *
 * The check is a hash of the content and of the balancer's locator. A reader may find one word of
 * an entry new and the other one old, or the balancer's place given to another balancer. In both
 * cases the check fails, and the entry counts as none: it is lost, as if it had been displaced.
 */
#ifndef SEGUE_AGENT_FLOWTABLE_H
#define SEGUE_AGENT_FLOWTABLE_H

#include "net/dryrun.h"
#include "net/hash.h"
#include "net/report.h"

#define AGENT_FLOWS_PER_BUCKET 8
#define AGENT_FLOW_BUCKET_BITS 15
/* The agent hashes the whole key of a flow, in words of 32 bits. */
#define AGENT_FLOW_WORDS 10
/* The number of keys for its two hashes (multilinear_twice). */
#define AGENT_FLOW_KEYS (AGENT_FLOW_WORDS + 4)
#define AGENT_SIGNATURE_SHIFT 30
#define AGENT_CHECK_SHIFT (64 - AGENT_SIGNATURE_SHIFT)
/* A tick of the table's clock is 2^20 ns, about a millisecond. */
#define AGENT_TICK_SHIFT 20
/* How far an entry can be ahead of a clock that was read earlier, in ticks. */
#define AGENT_MAX_LEAD 1024U

#define AGENT_SINCE_SHIFT 32
#define AGENT_BALANCER_SHIFT 22
#define AGENT_FIRST_SHIFT 6
#define AGENT_REPORTS_SHIFT 5
#define AGENT_TOLD_SHIFT 4
#define AGENT_ENCAPSULATION_SHIFT 3
#define AGENT_STATE_MASK 7
#define AGENT_BALANCER_BITS 10
#define AGENT_MAX_BALANCERS (1 << AGENT_BALANCER_BITS)
/* At how many places a balancer's locator is looked for. */
#define AGENT_BALANCER_REACH 4

enum agent_flow_state {
	AGENT_FLOW_LISTEN,  /* not in the table */
	AGENT_FLOW_WAIT,    /* the application's packets go to the balancer, with a signal */
	AGENT_FLOW_DIRECT,  /* the balancer knows the flow; packets go straight to the client */
	AGENT_FLOW_ENDING,  /* the end is not signalled yet: the next packet with room signals it */
	AGENT_FLOW_CLOSING, /* one side has ended the connection */
	AGENT_FLOW_COOKIE,  /* its packets carry a cookie (cookie.h), and no signal */
};

struct agent_flow_entry {
	__u64 identity;
	__u64 content;
};

struct agent_flow_bucket {
	struct agent_flow_entry entry[AGENT_FLOWS_PER_BUCKET];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << AGENT_FLOW_BUCKET_BITS);
	__uint(map_flags, BPF_F_MMAPABLE); /* aligns buckets with cache lines */
	__type(key, __u32);
	__type(value, struct agent_flow_bucket);
} agent_flows SEC(".maps");

/* The locators of the balancers that entries name, in memory order. 0: free. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, AGENT_MAX_BALANCERS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} agent_balancers SEC(".maps");

struct agent_flow_keys {
	__u64 key[AGENT_FLOW_KEYS];
};

/* Random numbers, which are kept with the table. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct agent_flow_keys);
} agent_flow_keys SEC(".maps");

/* The same numbers, as constants of the programs. */
const volatile __u64 agent_keys[AGENT_FLOW_KEYS];

/* Where a flow's entry is, or would be. */
struct agent_flow_place {
	struct agent_flow_bucket *bucket;
	__u64 signature; /* at its position in an entry */
};

/* A flow's entry. */
struct agent_flow {
	__u64 balancer; /* its locator, in memory order */
	__u32 since;	/* ticks */
	__u8 state;	/* enum agent_flow_state */
	__u8 encapsulation;
	__u8 told; /* the end was signalled to this balancer; AGENT_FLOW_COOKIE: the client has
			    * acknowledged the SYN-ACK */
	__u8 wants_report; /* this balancer takes load reports of the flow */
	__u16 first;	   /* what a report says about the first candidate (REPORT_FIRST_MASK);
			    * AGENT_FLOW_COOKIE: the cookie */
	__u8 pad[6];
};

/* The time in ticks. It wraps after 52 days. */
static __always_inline __u32 agent_now(void)
{
	return bpf_ktime_get_coarse_ns() >> AGENT_TICK_SHIFT;
}

/* The age in ticks of an entry. Another core may have made the entry after this one read the clock:
 * such an entry has age 0. */
static __always_inline __u32 age_since(__u32 since, __u32 now)
{
	__u32 age = now - since;

	return age > -AGENT_MAX_LEAD ? 0 : age;
}

/* The age of an entry, in ns. */
static __always_inline __u64 agent_flow_age(const struct agent_flow *flow)
{
	return (__u64)age_since(flow->since, agent_now()) << AGENT_TICK_SHIFT;
}

/* Finds the place of a flow. Any two flows share a bucket with a probability of
 * 2^-AGENT_FLOW_BUCKET_BITS, even if they have the same signature. */
static __always_inline struct agent_flow_place agent_place_of(const struct flow_key *key)
{
	struct two_hashes hash =
		multilinear_twice((const __u32 *)key, AGENT_FLOW_WORDS, agent_keys);
	__u32 number = place_of(hash.first) >> (64 - AGENT_FLOW_BUCKET_BITS);

	return (struct agent_flow_place){
		.bucket = bpf_map_lookup_elem(&agent_flows, &number),
		.signature = hash.second >> AGENT_SIGNATURE_SHIFT << AGENT_SIGNATURE_SHIFT,
	};
}

/* The check of an entry. Content and locator come from this host and from balancers: no client
 * chooses them. */
static __always_inline __u64 agent_check(__u64 content, __u64 locator)
{
	return spread(content * (agent_keys[0] | 1) + locator) >> AGENT_CHECK_SHIFT;
}

/* The i-th entry of a bucket to look at. Each flow starts its search at an entry that its signature
 * names. Most flows are found there at once. */
static __always_inline struct agent_flow_entry *agent_entry(const struct agent_flow_place *place,
							    int i)
{
	int way = (i ^ place->signature >> AGENT_SIGNATURE_SHIFT) & (AGENT_FLOWS_PER_BUCKET - 1);

	return &place->bucket->entry[way];
}

/* Whether an entry with this identity is that of the flow. */
static __always_inline bool is_of_flow(__u64 identity, const struct agent_flow_place *place)
{
	return (identity ^ place->signature) >> AGENT_SIGNATURE_SHIFT == 0;
}

/* The locator at a place of agent_balancers. */
static __always_inline __u64 *balancer_at(__u32 number)
{
	number &= AGENT_MAX_BALANCERS - 1;
	return bpf_map_lookup_elem(&agent_balancers, &number);
}

/* Reads an entry. If its check fails, the state stays AGENT_FLOW_LISTEN. */
static __always_inline void agent_entry_read(__u64 identity, __u64 content, struct agent_flow *flow)
{
	const __u64 *locator = balancer_at(content >> AGENT_BALANCER_SHIFT);

	if (!locator)
		return;
	flow->balancer = *(const volatile __u64 *)locator;
	flow->since = content >> AGENT_SINCE_SHIFT;
	flow->first = content >> AGENT_FIRST_SHIFT & REPORT_FIRST_MASK;
	flow->wants_report = content >> AGENT_REPORTS_SHIFT & 1;
	flow->told = content >> AGENT_TOLD_SHIFT & 1;
	flow->encapsulation = content >> AGENT_ENCAPSULATION_SHIFT & 1;
	if (((identity ^ agent_check(content, flow->balancer)) << AGENT_CHECK_SHIFT) == 0)
		flow->state = content & AGENT_STATE_MASK;
}

/* Finds the flow's entry. If there is none, or if its check fails, the state is
 * AGENT_FLOW_LISTEN. */
static __always_inline void agent_flow_find(const struct agent_flow_place *place,
					    struct agent_flow *flow)
{
	*flow = (struct agent_flow){};
	if (!place->bucket)
		return;
#pragma unroll
	for (int i = 0; i < AGENT_FLOWS_PER_BUCKET; i++) {
		const struct agent_flow_entry *entry = agent_entry(place, i);
		__u64 identity = *(const volatile __u64 *)&entry->identity;

		if (!is_of_flow(identity, place))
			continue;
		agent_entry_read(identity, *(const volatile __u64 *)&entry->content, flow);
		return;
	}
}

/* How readily an entry of another flow is replaced. First comes one that was never used, then the
 * oldest one of those that are closing or hold a cookie, and then the oldest of all. After the
 * handshake, a cookie is no loss: the socket has it, too (cookie.h). */
static __always_inline __u64 agent_entry_rank(__u64 content, __u32 now)
{
	__u64 age = age_since(content >> AGENT_SINCE_SHIFT, now);

	switch (content & AGENT_STATE_MASK) {
	case AGENT_FLOW_LISTEN:
		return 2ULL << 32;
	case AGENT_FLOW_CLOSING:
	case AGENT_FLOW_COOKIE:
		return 1ULL << 32 | age;
	default:
		return age;
	}
}

/* The entry that a flow takes: its own or, if it has none, the one with the highest rank. */
static __always_inline struct agent_flow_entry *
agent_entry_to_replace(const struct agent_flow_place *place, __u32 now)
{
	struct agent_flow_entry *best = agent_entry(place, 0);
	__u64 highest = 0;

#pragma unroll
	for (int i = 0; i < AGENT_FLOWS_PER_BUCKET; i++) {
		struct agent_flow_entry *entry = agent_entry(place, i);
		__u64 rank;

		if (is_of_flow(*(const volatile __u64 *)&entry->identity, place))
			return entry;
		rank = agent_entry_rank(*(const volatile __u64 *)&entry->content, now);
		if (rank > highest) {
			highest = rank;
			best = entry;
		}
	}
	return best;
}

/* Returns the place of a balancer's locator, or gives it a free one. If none is free, it takes the
 * place of another balancer, whose entries then fail their checks. */
static __always_inline __u32 agent_balancer_place(__u64 locator)
{
	__u32 first = spread(locator) >> (64 - AGENT_BALANCER_BITS);
	__u64 *at;

#pragma unroll
	for (__u32 i = 0; i < AGENT_BALANCER_REACH; i++) {
		__u64 found;

		at = balancer_at(first + i);
		if (!at)
			return first;
		found = *(const volatile __u64 *)at;
		if (!found)
			found = __sync_val_compare_and_swap(at, 0, locator);
		if (!found || found == locator)
			return (first + i) & (AGENT_MAX_BALANCERS - 1);
	}
	at = balancer_at(first);
	if (at)
		*(volatile __u64 *)at = locator;
	return first;
}

/* Enters a flow, or changes its entry. A dry run changes nothing. */
static __always_inline void agent_flow_put(const struct agent_flow_place *place,
					   const struct agent_flow *flow)
{
	struct agent_flow_entry *entry;
	__u64 content;
	__u32 now;

	if (dry_run || !place->bucket)
		return;
	now = agent_now();
	content = (__u64)now << AGENT_SINCE_SHIFT |
		  (__u64)agent_balancer_place(flow->balancer) << AGENT_BALANCER_SHIFT |
		  (__u64)(flow->first & REPORT_FIRST_MASK) << AGENT_FIRST_SHIFT |
		  (__u64)(flow->wants_report & 1) << AGENT_REPORTS_SHIFT |
		  (__u64)(flow->told & 1) << AGENT_TOLD_SHIFT |
		  (__u64)(flow->encapsulation & 1) << AGENT_ENCAPSULATION_SHIFT |
		  (flow->state & AGENT_STATE_MASK);
	entry = agent_entry_to_replace(place, now);
	*(volatile __u64 *)&entry->content = content;
	*(volatile __u64 *)&entry->identity =
		place->signature | agent_check(content, flow->balancer);
}

#endif
