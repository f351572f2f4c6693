/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow table: set-associative, with one cache line per bucket and eight entries of 64 bits in
 * each. All cores share it without locks. Readers load an entry once. Writers replace a whole entry
 * by compare-and-swap; a writer that loses the race changes nothing.
 *
 *      63                    30 29            14 13  12 11          0
 *     +------------------------+----------------+------+-------------+
 *     |       signature        |     server     | state|  last seen  |
 *     +------------------------+----------------+------+-------------+
 *
 * A free entry is 0.
 *
 * The bucket's number and the signature come from independent hashes, so a
 * lookup mistakes another flow for its own with probability at most 8 / 2^33,
 * less than one in a billion (docs/flow-table.md).
 */
#ifndef SEGUE_BALANCER_FLOWTABLE_H
#define SEGUE_BALANCER_FLOWTABLE_H

#include "decision.h"
#include "loads.h"
#include "net/hash.h"

#define FLOWS_PER_BUCKET 8
#define FLOW_SERVER_SHIFT 14
#define FLOW_STATE_SHIFT 12
#define FLOW_STATE_MASK 3
#define FLOW_SIGNATURE_SHIFT 30
#define FLOW_TIME_MASK 0xfffULL
#define FLOW_SEEN_MASK 0x3fffULL /* state and time */
/* The bits of the signature that are used: all. A test uses fewer, so that flows share
 * signatures. */
#ifndef FLOW_SIGNATURE_MASK
#define FLOW_SIGNATURE_MASK (~0ULL << FLOW_SIGNATURE_SHIFT)
#endif
/* How far an entry can be ahead of a clock that was read earlier, in ticks. */
#define FLOW_MAX_LEAD 32
/* An established flow yields its entry to a new flow only after it was idle for this time. */
#define FLOW_MIN_IDLE 15 /* ticks: about a minute */
/* The last packets of a connection follow the client's FIN or RST within this time: one full
 * tick, and the rest of the tick of the FIN. */
#define FLOW_LINGER 2 /* ticks */

enum flow_state {
	FLOW_FREE,
	FLOW_NEW, /* one packet seen: it may belong to a flood */
	FLOW_ESTABLISHED,
	FLOW_CLOSING, /* the client sent FIN or RST, or the server signalled the end */
	/* Established, and silent for so long that it does not count as a load of its server. An
	 * entry has two bits for the state: they are 0, as in a free entry, but the entry is not
	 * 0. */
	FLOW_SILENT,
};

#define FLOW_STATES (FLOW_SILENT + 1)

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

/* The flows of services without a flow table that are observed (observed.h), in the same format. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_bucket);
} observed SEC(".maps");

/* Secret, random, and kept as long as the table: set at load. */
const volatile __u64 flow_keys[FLOW_KEYS];
/* The tables are of a build before TABLES_VERSION: they keep its hash for the bucket. */
const volatile bool flow_place_is_former;
const volatile __u32 flow_bucket_shift;	    /* 64 less the bits of a bucket's number */
const volatile __u32 observed_bucket_shift; /* likewise */
/* One tick of `last seen` is 2^this jiffies, 3.6 to 7.2 s. */
const volatile __u32 flow_tick_shift;

/* A flow, as a lookup found it. Only this file and halfopen.h look inside. */
struct flow {
	struct flow_bucket *bucket;
	__u64 place;	 /* the highest bits are the bucket's number */
	__u64 signature; /* at its position in an entry */
	__u64 value;	 /* the entry, as it was read; 0: the flow has none */
};

/* The time in ticks. Jiffies take a load; the clocks in nanoseconds take a call. */
static __always_inline __u64 flow_now(void)
{
	return (bpf_jiffies64() >> flow_tick_shift) & FLOW_TIME_MASK;
}

/* The fields of an entry's value. Only this file, halfopen.h and sweep.bpf.c read them. */
static __always_inline __u32 entry_server(__u64 value)
{
	return (value >> FLOW_SERVER_SHIFT) & 0xffff;
}

static __always_inline enum flow_state entry_state(__u64 value)
{
	enum flow_state state = (value >> FLOW_STATE_SHIFT) & FLOW_STATE_MASK;

	return value && !state ? FLOW_SILENT : state;
}

/* The bits of a state in an entry. */
static __always_inline __u64 state_bits(enum flow_state state)
{
	return (__u64)(state & FLOW_STATE_MASK) << FLOW_STATE_SHIFT;
}

/* Ticks since the flow was seen. Another core may have renewed the entry after this one read the
 * clock: such an entry has age 0. */
static __always_inline __u64 entry_age(__u64 value, __u64 now)
{
	__u64 age = (now - value) & FLOW_TIME_MASK;

	return age > FLOW_TIME_MASK - FLOW_MAX_LEAD ? 0 : age;
}

static __always_inline __u64 entry_value(__u64 signature, __u32 server, enum flow_state state,
					 __u64 now)
{
	return signature | (__u64)server << FLOW_SERVER_SHIFT | state_bits(state) | now;
}

/*
 * What is hashed of a flow: the source, both ports and the service. The service stands for VIP and
 * protocol.
 */
#define FLOW_HASH_INPUT(key, service)                                            \
	{                                                                        \
		(key)->source.s6_addr32[0],	     (key)->source.s6_addr32[1], \
		(key)->source.s6_addr32[2],	     (key)->source.s6_addr32[3], \
		*(const __u32 *)&(key)->source_port, service,                    \
	}

/* The place in tables of a former build. A client can choose sources that share a bucket. */
static __always_inline __u64 former_place(const struct flow_key *key, __u32 service)
{
	const __be64 *source = (const __be64 *)&key->source;
	__u64 rest = (__u64)service << 32 | *(const __u32 *)&key->source_port;

	return spread(bpf_be64_to_cpu(source[0]) * flow_keys[0] +
		      bpf_be64_to_cpu(source[1]) * flow_keys[1] + rest * flow_keys[2]);
}

/* The place in a flow table. For any two flows, the probability that they share one of 2^n buckets
 * is 2^-n, also if they have the same signature. */
static __always_inline __u64 flow_place(const struct flow_key *key, __u32 service)
{
	const __u32 words[FLOW_WORDS] = FLOW_HASH_INPUT(key, service);
	__u64 place = place_of(multilinear(words, FLOW_WORDS, flow_keys + 1, flow_keys[0]));

	/* Otherwise the compiler would compute it elsewhere, and the program would jump there and
	 * back. */
	barrier_var(place);
	if (flow_place_is_former)
		place = former_place(key, service);
	return place;
}

static __always_inline __u64 flow_signature(const struct flow_key *key, __u32 service)
{
	const __u32 words[FLOW_WORDS] = FLOW_HASH_INPUT(key, service);
	__u64 signature = multilinear(words, FLOW_WORDS, flow_keys + 3, flow_keys[FLOW_KEYS - 1]) &
			  FLOW_SIGNATURE_MASK;

	/* Otherwise the compiler would compute it later, and keep twelve numbers on the stack. */
	barrier_var(signature);
	return signature;
}

static __always_inline __u64 entry_read(const struct flow_bucket *bucket, int way)
{
	return *(const volatile __u64 *)&bucket->entry[way];
}

/* The bucket that the program may change: in a dry run, a copy. */
static __always_inline struct flow_bucket *changeable(struct flow_bucket *bucket,
						      struct flow_bucket *copy)
{
	if (!dry_run || !bucket)
		return bucket;
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++)
		copy->entry[i] = entry_read(bucket, i);
	return copy;
}

/* The i-th entry of a bucket to look at. Each flow starts at the entry that its signature names.
 * Most flows are found there at once, so the processor predicts the branches well. */
static __always_inline int flow_way(__u64 signature, int i)
{
	return (i ^ signature >> FLOW_SIGNATURE_SHIFT) & (FLOWS_PER_BUCKET - 1);
}

static __always_inline bool entry_is_own(const struct flow *flow, __u64 value)
{
	return (value ^ flow->signature) >> FLOW_SIGNATURE_SHIFT == 0;
}

/* Searches the bucket for the entry with the flow's signature. */
static __always_inline void flow_search(struct flow *flow)
{
	__u64 signature = flow->signature;

	flow->value = 0;
	if (!flow->bucket)
		return;
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		__u64 value = entry_read(flow->bucket, flow_way(signature, i));

		if (entry_is_own(flow, value)) {
			/* Otherwise the compiler would test each entry for 0 first, by a branch
			 * that the processor predicts badly. */
			barrier_var(value);
			if (value) {
				flow->value = value;
				return;
			}
		}
		/* Otherwise the compiler would prepare all iterations before the first. */
		barrier_var(signature);
	}
}

static struct flow_bucket flows_copy;

static __always_inline void flow_lookup(const struct flow_key *key, __u32 service,
					struct flow *flow)
{
	__u32 number;

	flow->place = flow_place(key, service);
	flow->signature = flow_signature(key, service);
	number = flow->place >> flow_bucket_shift;
	flow->bucket = changeable(bpf_map_lookup_elem(&flows, &number), &flows_copy);
	flow_search(flow);
}

static __always_inline bool flow_known(const struct flow *flow)
{
	return flow->value;
}

/* The flow label for routers: the signature's low bits. */
static __always_inline __u32 flow_label(const struct flow *flow)
{
	return flow->signature >> FLOW_SIGNATURE_SHIFT;
}

/* Gives a flow that is not looked up a signature, for its label only. */
static __always_inline void flow_sign(struct flow *flow, const struct flow_key *key)
{
	flow->signature =
		spread(*(const __u32 *)&key->source_port * GOLDEN_RATIO + key->source.s6_addr32[3]);
}

/* Gives a flow that is not looked up a server. The flow has no bucket. */
static __always_inline void flow_assume(struct flow *flow, const struct flow_key *key, __u32 server)
{
	flow_sign(flow, key);
	flow->value = (__u64)server << FLOW_SERVER_SHIFT;
}

/* The server of a known flow. */
static __always_inline __u32 flow_server(const struct flow *flow)
{
	return entry_server(flow->value);
}

/* Whether the client has ended the connection, or its server has. */
static __always_inline bool flow_is_closing(const struct flow *flow)
{
	return entry_state(flow->value) == FLOW_CLOSING;
}

/* Whether the connection has ended so long ago that none of its packets is under way. Before, a
 * SYN may be a late copy of the connection's own SYN. */
static __always_inline bool flow_is_over(const struct flow *flow, __u64 now)
{
	return flow_is_closing(flow) && entry_age(flow->value, now) >= FLOW_LINGER;
}

static __always_inline bool flow_is_idle(const struct flow *flow, __u64 now)
{
	return entry_age(flow->value, now) >= FLOW_MIN_IDLE;
}

/* Notes the entry of a known flow. */
static __always_inline void note_entry(const struct flow *flow, enum departure departure)
{
	if (!dry_run)
		return;
	decision.entry = (struct decided_entry){
		.server = flow_server(flow),
		.age = entry_age(flow->value, flow_now()),
		.state = entry_state(flow->value),
		.departure = departure,
	};
}

/* Whether the flow is established and was seen in this tick: another packet changes nothing. */
static __always_inline bool flow_is_fresh(const struct flow *flow, __u64 now)
{
	return (flow->value & FLOW_SEEN_MASK) ==
	       ((__u64)FLOW_ESTABLISHED << FLOW_STATE_SHIFT | now);
}

/* What happens to a flow. */
enum flow_event {
	FLOW_OPENS,	/* a SYN: nothing confirms that the client is there */
	FLOW_CONTINUES, /* any other packet */
	FLOW_ENDS,	/* a FIN or RST, or a remove-stickiness */
};

static __always_inline bool is_established(enum flow_state state)
{
	return state == FLOW_ESTABLISHED || state == FLOW_SILENT;
}

/*
 * The state machine. A repeated SYN does not confirm a flow, because a flood could repeat SYNs too.
 * Any other second packet confirms it. So does a packet long after a FIN or RST: the connection was
 * only half closed, or the FIN or RST was forged.
 */
static __always_inline enum flow_state flow_next(enum flow_state from, enum flow_event event)
{
	switch (event) {
	case FLOW_ENDS:
		return FLOW_CLOSING;
	case FLOW_OPENS:
		return is_established(from) ? from : FLOW_NEW;
	default:
		return from == FLOW_FREE ? FLOW_NEW : FLOW_ESTABLISHED;
	}
}

/* Whether a change gives an entry to another flow, or a flow to another server. */
static __always_inline bool is_replaced(__u64 old, __u64 new)
{
	return (old ^ new) >> FLOW_SERVER_SHIFT;
}

/* Counts a change of a flow's state in the load of its server. FLOW_FREE means that the flow had no
 * entry before, or has none afterwards. Returns the load's word `flows` before the change. */
static __always_inline __u64 count_states(struct load *load, enum flow_state from,
					  enum flow_state to)
{
	__u64 more = 0;

	if (to == FLOW_NEW && from != FLOW_NEW)
		__sync_fetch_and_add(&load->placed, 1);
	if (from == FLOW_NEW && to == FLOW_FREE)
		__sync_fetch_and_add(&load->lost, 1);
	else if (from == FLOW_NEW && to != FLOW_NEW)
		more = LOAD_ANSWERED;
	if (to == FLOW_ESTABLISHED)
		more += LOAD_ESTABLISHED;
	if (from == FLOW_ESTABLISHED)
		more -= LOAD_ESTABLISHED;
	return more ? __sync_fetch_and_add(&load->flows, more) : flows_of(load);
}

/* Counts a change of an entry, and what it tells about the server (observe.h). Not inlined: most
 * packets change nothing, and the code is large. */
int note_change(__u64 old, __u64 new);

static __always_inline bool entry_swap(__u64 *entry, __u64 old, __u64 new)
{
	return __sync_val_compare_and_swap(entry, old, new) == old;
}

/*
 * Changes the entry of the flow's bucket that has the old value. False: another core was faster,
 * and the entry is as that core left it. The data path makes every change of an entry's state, age
 * or server here, and the sweep makes its changes by sweep_entry(). Both count the change by
 * count_states(). So the loads of servers always equal what the entries of both flow tables add to
 * them, except for changes under way.
 */
static __always_inline bool flow_transition(const struct flow *flow, __u64 old, __u64 new)
{
	bool is_done = false;

#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		int way = flow_way(flow->signature, i);

		if (entry_read(flow->bucket, way) == old) {
			is_done = entry_swap(&flow->bucket->entry[way], old, new);
			break;
		}
	}
	if (is_done && !dry_run)
		note_change(old, new);
	return is_done;
}

/* Notes an event of a known flow, which stays with its server. It writes only if something
 * changes, at most once per tick, so that cores can share the cache line. */
static __always_inline bool flow_renew(struct flow *flow, enum flow_event event, __u64 now)
{
	__u64 seen = state_bits(flow_next(entry_state(flow->value), event)) | now;
	__u64 changed = (flow->value ^ seen) & FLOW_SEEN_MASK;

	return changed && flow_transition(flow, flow->value, flow->value ^ changed);
}

#define FLOW_RANK_FREE (3 * (FLOW_TIME_MASK + 1)) /* the highest rank */

/* How readily an entry is replaced; 0: not at all. */
static __always_inline __u64 entry_rank(__u64 value, __u64 now)
{
	__u64 age = entry_age(value, now);

	if (!value)
		return FLOW_RANK_FREE;
	if (!(value >> FLOW_STATE_SHIFT & 1)) /* established, or silent */
		return age < FLOW_MIN_IDLE ? 0 : age;
	return FLOW_TIME_MASK + 1 + age; /* at least 1, also in the tick it was seen */
}

/*
 * Enters a flow. It replaces the flow's own old entry, or else the entry of the highest rank: a
 * free one, then the oldest that is new or closing, then the oldest idle one. Nothing is done when
 * all entries are in use, or when another core was faster. With `spares_own`, an entry that another
 * core has made for the same flow since the lookup is not replaced.
 */
static __always_inline bool flow_enter(struct flow *flow, __u32 server, enum flow_state state,
				       __u64 now, bool spares_own)
{
	__u64 value = entry_value(flow->signature, server, state, now);
	__u64 old = flow->value, best = 0;

	if (!flow->bucket)
		return false;
	if (flow_known(flow))
		return flow_transition(flow, old, value);
#pragma unroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		__u64 other = entry_read(flow->bucket, flow_way(flow->signature, i));
		__u64 rank = spares_own && entry_is_own(flow, other) ? 0 : entry_rank(other, now);

		if (rank > best) {
			best = rank;
			old = other;
		}
		if (rank == FLOW_RANK_FREE)
			break;
	}
	/* Otherwise the compiler would keep the addresses of all entries on the stack. */
	barrier_var(flow->signature);
	return best && flow_transition(flow, old, value);
}

#endif
