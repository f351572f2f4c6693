/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow table: set-associative, one cache line a bucket, eight flows of 64
 * bits in it, shared by all cores without locks. Readers load an entry once;
 * writers exchange it whole with compare-and-swap, and who loses leaves it be.
 *
 *      63                    30 29            14 13  12 11          0
 *     +------------------------+----------------+------+-------------+
 *     |       signature        |     server     | state|  last seen  |
 *     +------------------------+----------------+------+-------------+
 *
 * The bucket's number and the signature come from independent hashes, so a
 * lookup mistakes another flow for its own with probability at most 8 / 2^33,
 * less than one in a billion (docs/flow-table.md).
 */
#ifndef SEGUE_BALANCER_FLOWTABLE_H
#define SEGUE_BALANCER_FLOWTABLE_H

#include "hash.h"

#define FLOWS_PER_BUCKET 8
#define FLOW_SERVER_SHIFT 14
#define FLOW_STATE_SHIFT 12
#define FLOW_SIGNATURE_SHIFT 30
#define FLOW_TIME_MASK 0xfffULL
#define FLOW_SEEN_MASK 0x3fffULL /* state and time */
/* Which bits of the signature there are: all. A test has fewer, to meet flows that share one. */
#ifndef FLOW_SIGNATURE_MASK
#define FLOW_SIGNATURE_MASK (~0ULL << FLOW_SIGNATURE_SHIFT)
#endif
/* How far an entry can be ahead of a clock that was read earlier, in ticks. */
#define FLOW_MAX_LEAD 32
/* An established flow yields its entry to a new one only when idle as long. */
#define FLOW_MIN_IDLE 15 /* ticks: about a minute */

enum flow_state {
	FLOW_FREE,
	FLOW_NEW, /* one packet seen: perhaps a flood's */
	FLOW_ESTABLISHED,
	FLOW_CLOSING, /* the client sent FIN or RST, or the server signalled the end */
};

struct flow_bucket {
	__u64 entry[FLOWS_PER_BUCKET];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_bucket);
} flows SEC(".maps");

/* Secret, random, and kept as long as the table: set at load. */
const volatile __u64 flow_bucket_keys[FLOW_BUCKET_WORDS];
const volatile __u64 flow_signature_keys[FLOW_WORDS + 1];
const volatile __u32 flow_bucket_shift; /* 64 less the bits of a bucket's number */
/* One tick of `last seen` is 2^this jiffies, 3.6 to 7.2 s. */
const volatile __u32 flow_tick_shift;

/* A flow's place in the table. */
struct flow_slot {
	struct flow_bucket *bucket;
	__u64 place;	 /* its highest bits are the bucket's number */
	__u64 signature; /* in its place in an entry */
	__u64 value;	 /* its entry when that was read; 0: it has none */
};

/* Jiffies cost a load; the clocks in nanoseconds cost a call. */
static __always_inline __u64 flow_now(void)
{
	return (bpf_jiffies64() >> flow_tick_shift) & FLOW_TIME_MASK;
}

static __always_inline __u32 flow_server(__u64 value)
{
	return (value >> FLOW_SERVER_SHIFT) & 0xffff;
}

static __always_inline enum flow_state flow_state(__u64 value)
{
	return (value >> FLOW_STATE_SHIFT) & 3;
}

/* Another core may have renewed the entry after this one read the clock: ages
 * of less than nothing are nothing. */
static __always_inline __u64 flow_age(__u64 value, __u64 now)
{
	__u64 age = (now - value) & FLOW_TIME_MASK;

	return age > FLOW_TIME_MASK - FLOW_MAX_LEAD ? 0 : age;
}

static __always_inline __u64 flow_value(__u64 signature, __u32 server, enum flow_state state,
					__u64 now)
{
	return signature | (__u64)server << FLOW_SERVER_SHIFT | (__u64)state << FLOW_STATE_SHIFT |
	       now;
}

/*
 * A service stands for the VIP and the protocol, and the port is hashed for services of
 * all ports. In their own order, addresses differ in the low bits, which decide the most
 * of a product.
 */
static __always_inline __u64 flow_place(const struct flow_key *key, __u32 service)
{
	const __be64 *source = (const __be64 *)&key->source;
	__u64 rest = (__u64)service << 32 | *(const __u32 *)&key->source_port;

	return spread(bpf_be64_to_cpu(source[0]) * flow_bucket_keys[0] +
		      bpf_be64_to_cpu(source[1]) * flow_bucket_keys[1] +
		      rest * flow_bucket_keys[2]);
}

static __always_inline __u64 flow_signature(const struct flow_key *key, __u32 service)
{
	const __u32 words[FLOW_WORDS] = {
		key->source.s6_addr32[0],	   key->source.s6_addr32[1],
		key->source.s6_addr32[2],	   key->source.s6_addr32[3],
		*(const __u32 *)&key->source_port, service,
	};
	__u64 signature = multilinear(words, FLOW_WORDS, flow_signature_keys) & FLOW_SIGNATURE_MASK;

	/* Or the compiler, to have it later, would keep twelve numbers on the stack. */
	barrier_var(signature);
	return signature;
}

static __always_inline __u64 flow_read(const struct flow_bucket *bucket, int way)
{
	return *(const volatile __u64 *)&bucket->entry[way];
}

/* A flow's ways through its bucket begin where its signature says: in most buckets
 * it is there, and the processor foresees that. */
static __always_inline int flow_way(__u64 signature, int i)
{
	return (i ^ signature >> FLOW_SIGNATURE_SHIFT) & (FLOWS_PER_BUCKET - 1);
}

static __always_inline bool flow_is_own(const struct flow_slot *slot, __u64 value)
{
	return (value ^ slot->signature) >> FLOW_SIGNATURE_SHIFT == 0;
}

/* Reads the entry of the signature in the bucket, if there is one. */
static __always_inline void flow_search(struct flow_slot *slot)
{
	__u64 signature = slot->signature;

	slot->value = 0;
	if (!slot->bucket)
		return;
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		__u64 value = flow_read(slot->bucket, flow_way(signature, i));

		if (flow_is_own(slot, value) && flow_state(value) != FLOW_FREE) {
			slot->value = value;
			return;
		}
		/* Or what is of use from the second on would be computed before the first. */
		barrier_var(signature);
	}
}

static __always_inline void flow_lookup(const struct flow_key *key, __u32 service,
					struct flow_slot *slot)
{
	__u32 number;

	slot->signature = flow_signature(key, service);
	slot->place = flow_place(key, service);
	number = slot->place >> flow_bucket_shift;
	slot->bucket = bpf_map_lookup_elem(&flows, &number);
	flow_search(slot);
}

static __always_inline bool flow_known(const struct flow_slot *slot)
{
	return slot->value;
}

/* What tells the flow from others to routers: the signature's low bits. */
static __always_inline __u32 flow_label(const struct flow_slot *slot)
{
	return slot->signature >> FLOW_SIGNATURE_SHIFT;
}

/* Replaces an entry of the bucket; false when another core was faster. */
static __always_inline bool flow_exchange(const struct flow_slot *slot, __u64 old, __u64 new)
{
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		int way = flow_way(slot->signature, i);

		if (flow_read(slot->bucket, way) == old)
			return __sync_val_compare_and_swap(&slot->bucket->entry[way], old, new) ==
			       old;
	}
	return false;
}

/* Whether it is established and was seen in this tick: another packet tells nothing new. */
static __always_inline bool flow_is_fresh(__u64 value, __u64 now)
{
	return (value & FLOW_SEEN_MASK) == ((__u64)FLOW_ESTABLISHED << FLOW_STATE_SHIFT | now);
}

/* Notes that the flow was seen. Writes only what changed, and not twice a tick,
 * to leave the line shared between cores. */
static __always_inline void flow_touch(struct flow_slot *slot, enum flow_state state, __u64 now)
{
	__u64 seen = (__u64)state << FLOW_STATE_SHIFT | now;
	__u64 changed = (slot->value ^ seen) & FLOW_SEEN_MASK;

	if (changed)
		flow_exchange(slot, slot->value, slot->value ^ changed);
}

/* How readily an entry yields its place; 0: not at all. */
static __always_inline __u64 flow_rank(__u64 value, __u64 now)
{
	__u64 age = flow_age(value, now);

	switch (flow_state(value)) {
	case FLOW_FREE:
		return 3 * (FLOW_TIME_MASK + 1);
	case FLOW_ESTABLISHED:
		return age < FLOW_MIN_IDLE ? 0 : age;
	default: /* at least 1, also in the tick it was seen */
		return FLOW_TIME_MASK + 1 + age;
	}
}

/*
 * Enters a flow, over its own old entry or the one that yields most readily: free, then the
 * oldest that is new or closing, then the oldest idle. False when all are in use, or another
 * core was faster. Whether one that another core has made of the flow since it was looked up
 * is spared is for the caller to say.
 */
static __always_inline bool flow_enter(struct flow_slot *slot, __u32 server, enum flow_state state,
				       __u64 now, bool spares_own)
{
	__u64 value = flow_value(slot->signature, server, state, now);
	__u64 old = slot->value, best = 0;

	if (!slot->bucket)
		return false;
	if (flow_known(slot))
		return flow_exchange(slot, old, value);
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		__u64 other = flow_read(slot->bucket, flow_way(slot->signature, i));
		__u64 rank = spares_own && flow_is_own(slot, other) ? 0 : flow_rank(other, now);

		if (rank > best) {
			best = rank;
			old = other;
		}
	}
	return best && flow_exchange(slot, old, value);
}

static __always_inline bool flow_insert(struct flow_slot *slot, __u32 server, enum flow_state state,
					__u64 now)
{
	return flow_enter(slot, server, state, now, false);
}

#endif
