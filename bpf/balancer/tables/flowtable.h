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
 * A free entry is 0. Once the flow has ended, the highest bit of `last seen` tells whether only the
 * client has ended it, and the other 11 bits are the time.
 *
 * The bucket's number and the signature come from independent hashes, so a
 * lookup mistakes another flow for its own with probability at most 8 / 2^33,
 * less than one in a billion (docs/understand/flow-table.md).
 */
#ifndef SEGUE_BALANCER_TABLES_FLOWTABLE_H
#define SEGUE_BALANCER_TABLES_FLOWTABLE_H

#include "balancer/decision.h"
#include "balancer/features.h"
#include "balancer/tables/flowstate.h"
#include "balancer/tables/loads.h"
#include "net/hash.h"
#include "net/verifier.h"

#define FLOWS_PER_BUCKET 8
#define FLOW_SERVER_SHIFT 14
#define FLOW_STATE_SHIFT 12
#define FLOW_STATE_MASK 3
#define FLOW_SIGNATURE_SHIFT 30
#define FLOW_TIME_MASK 0xfffULL
#define FLOW_SEEN_MASK 0x3fffULL /* state and time */
/* The time of a flow that has ended, and the bit that says that only the client has ended it. */
#define FLOW_ENDED_TIME_MASK 0x7ffULL
#define FLOW_BY_CLIENT 0x800ULL
/* The bits of the signature that are used: all of them. A test uses fewer, so that flows share
 * signatures. */
#ifndef FLOW_SIGNATURE_MASK
#define FLOW_SIGNATURE_MASK (~0ULL << FLOW_SIGNATURE_SHIFT)
#endif
/* How far an entry can be ahead of a clock that was read earlier, in ticks. */
#define FLOW_MAX_LEAD 32
/* An established flow yields its entry to a new flow only after it was idle for this time. */
#define FLOW_MIN_IDLE 15 /* ticks: about a minute */
/* The last packets of a connection follow its end within this time: one full tick, and the rest of
 * the tick of the FIN. */
#define FLOW_LINGER 2 /* ticks */

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
const volatile __u32 flow_bucket_shift;	    /* 64 less the bits of a bucket's number */
const volatile __u32 observed_bucket_shift; /* the same for `observed` */
/* One tick of `last seen` is 2^this jiffies, 3.6 to 7.2 s. */
const volatile __u32 flow_tick_shift;

/* A flow, as a lookup found it. */
struct flow {
	struct flow_bucket *bucket;
	__u64 place;	 /* the highest bits are the bucket's number */
	__u64 signature; /* at its position in an entry */
	__u64 value;	 /* the entry, as it was read; 0: the flow has none */
};

/* The time in ticks. Jiffies are read from memory; the clocks in nanoseconds need a call. */
static __always_inline __u64 flow_now(void)
{
	return (bpf_jiffies64() >> flow_tick_shift) & FLOW_TIME_MASK;
}

/* The slot of an entry's server. */
static __always_inline __u32 entry_server(__u64 value)
{
	return (value >> FLOW_SERVER_SHIFT) & 0xffff;
}

/* The state of an entry: see enum flow_state. */
static __always_inline enum flow_state entry_state(__u64 value)
{
	enum flow_state state = (value >> FLOW_STATE_SHIFT) & FLOW_STATE_MASK;

	if (state == FLOW_CLOSED && value & FLOW_BY_CLIENT)
		return FLOW_CLOSING;
	return value && !state ? FLOW_SILENT : state;
}

/* The bits of a state and a time in an entry. */
static __always_inline __u64 seen_bits(enum flow_state state, __u64 time)
{
	if (has_ended(state))
		time &= FLOW_ENDED_TIME_MASK;
	if (state == FLOW_CLOSING)
		time |= FLOW_BY_CLIENT;
	return (__u64)(state & FLOW_STATE_MASK) << FLOW_STATE_SHIFT | time;
}

/* The bits of an entry that have the time. A flow that has ended has both state bits, and one bit
 * less for the time. */
static __always_inline __u64 time_mask(__u64 value)
{
	return FLOW_TIME_MASK >> (value >> FLOW_STATE_SHIFT & value >> (FLOW_STATE_SHIFT + 1) & 1);
}

/* Ticks since the flow was seen. Another core may have renewed the entry after this one read the
 * clock: such an entry has age 0. */
static __always_inline __u64 entry_age(__u64 value, __u64 now)
{
	__u64 mask = time_mask(value), age = (now - value) & mask;

	return age > mask - FLOW_MAX_LEAD ? 0 : age;
}

static __always_inline __u64 entry_value(__u64 signature, __u32 server, enum flow_state state,
					 __u64 now)
{
	return signature | (__u64)server << FLOW_SERVER_SHIFT | seen_bits(state, now);
}

/*
 * The words of a flow that are hashed: source, both ports and service. The service stands for VIP
 * and protocol.
 */
#define FLOW_HASH_INPUT(key, service)                                            \
	{                                                                        \
		(key)->source.s6_addr32[0],	     (key)->source.s6_addr32[1], \
		(key)->source.s6_addr32[2],	     (key)->source.s6_addr32[3], \
		*(const __u32 *)&(key)->source_port, service,                    \
	}

/*
 * The hashes of a flow: its place in a flow table, and the signature of its entry. For any two
 * flows, the probability that they share one of 2^n buckets is 2^-n, even if they have the same
 * signature.
 */
static __always_inline struct two_hashes flow_hashes(const struct flow_key *key, __u32 service)
{
	const __u32 words[FLOW_WORDS] = FLOW_HASH_INPUT(key, service);
	struct two_hashes hash = multilinear_twice(words, FLOW_WORDS, flow_keys);

	hash.first = place_of(hash.first);
	hash.second &= FLOW_SIGNATURE_MASK;
	return hash;
}

/* The first hash of flow_hashes() alone: the place of a flow in a flow table. */
static __always_inline __u64 flow_place(const struct flow_key *key, __u32 service)
{
	const __u32 words[FLOW_WORDS] = FLOW_HASH_INPUT(key, service);

	return place_of(multilinear(words, FLOW_WORDS, flow_keys + 1, flow_keys[0]));
}

static __always_inline __u64 entry_read(const struct flow_bucket *bucket, int way)
{
	return *(const volatile __u64 *)&bucket->entry[way];
}

/* Returns the bucket that the program may change: `bucket`, or in a dry run `copy`, into which it
 * copies the entries. */
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
	__u64 way = i ^ signature >> FLOW_SIGNATURE_SHIFT;

	/* Otherwise the compiler takes the remainder first. The verifier of Linux 6.1 does not know
	 * the bounds of an XOR of two variables. */
	barrier_var(way);
	return way & (FLOWS_PER_BUCKET - 1);
}

/* Whether an entry has the flow's signature. */
static __always_inline bool entry_is_own(const struct flow *flow, __u64 value)
{
	return (value ^ flow->signature) >> FLOW_SIGNATURE_SHIFT == 0;
}

/* Searches the flow's bucket for the entry with its signature, and sets `value` to that entry, or
 * to 0 if there is none. */
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

/* Computes the hashes of a flow. */
static __always_inline void flow_identify(struct flow *flow, const struct flow_key *key,
					  __u32 service)
{
	struct two_hashes hash = flow_hashes(key, service);

	flow->place = hash.first;
	flow->signature = hash.second;
}

/* Looks up a flow whose hashes are known. */
static __always_inline void flow_find(struct flow *flow)
{
	__u32 number = flow->place >> flow_bucket_shift;

	flow->bucket = changeable(bpf_map_lookup_elem(&flows, &number), &flows_copy);
	flow_search(flow);
}

static __always_inline void flow_lookup(const struct flow_key *key, __u32 service,
					struct flow *flow)
{
	flow_identify(flow, key, service);
	flow_find(flow);
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

/* Gives a signature to a flow that is not looked up. Only flow_label() uses this signature. */
static __always_inline void flow_sign(struct flow *flow, const struct flow_key *key)
{
	flow->signature =
		spread(*(const __u32 *)&key->source_port * GOLDEN_RATIO + key->source.s6_addr32[3]);
}

/* Gives a server and a flow label to a flow that is not looked up. The flow has no bucket, so it
 * cannot be entered. */
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

/* Whether the server has ended the connection. */
static __always_inline bool flow_is_closed(const struct flow *flow)
{
	return entry_state(flow->value) == FLOW_CLOSED;
}

/* Whether packets of a flow that has ended may still be under way. A SYN may then be a late copy of
 * the connection's own SYN. */
static __always_inline bool flow_lingers(const struct flow *flow, __u64 now)
{
	return has_ended(entry_state(flow->value)) && entry_age(flow->value, now) < FLOW_LINGER;
}

/* Whether the server or the client has ended the connection, so long ago that none of its packets
 * is under way. If it was the client, its FIN or RST may be forged. */
static __always_inline bool flow_may_be_over(const struct flow *flow, __u64 now)
{
	return has_ended(entry_state(flow->value)) && !flow_lingers(flow, now);
}

/* Whether the server has ended the connection, so long ago that none of its packets is under
 * way. */
static __always_inline bool flow_is_over(const struct flow *flow, __u64 now)
{
	return flow_is_closed(flow) && flow_may_be_over(flow, now);
}

/* Whether the connection may go on: it is established, and its client has not sent FIN or RST, or
 * did so only a moment ago. */
static __always_inline bool flow_may_go_on(const struct flow *flow, __u64 now)
{
	enum flow_state state = entry_state(flow->value);

	return state == FLOW_ESTABLISHED || state == FLOW_SILENT ||
	       (state == FLOW_CLOSING && flow_lingers(flow, now));
}

/* Whether the flow has an entry that is not FLOW_NEW, and that was renewed a moment ago. */
static __always_inline bool flow_is_recent(const struct flow *flow, __u64 now)
{
	return flow_known(flow) && entry_state(flow->value) != FLOW_NEW &&
	       entry_age(flow->value, now) < FLOW_LINGER;
}

/* Whether a flow was idle for at least FLOW_MIN_IDLE. */
static __always_inline bool flow_is_idle(const struct flow *flow, __u64 now)
{
	return entry_age(flow->value, now) >= FLOW_MIN_IDLE;
}

/* Notes an entry, and why the packet leaves its server, in the decision of a dry run. Not inlined:
 * it would use much of the stack. */
__noinline int note_entry_value(__u64 value, enum departure departure)
{
	if (!dry_run)
		return 0;
	decision.entry = (struct decided_entry){
		.server = entry_server(value),
		.age = entry_age(value, flow_now()),
		.state = entry_state(value),
		.departure = departure,
	};
	return 0;
}

/* Notes the entry of a known flow. */
static __always_inline void note_entry(const struct flow *flow, enum departure departure)
{
	if (dry_run)
		note_entry_value(flow->value, departure);
}

/* Whether the flow is established and was seen in this tick: another packet changes nothing. */
static __always_inline bool flow_is_fresh(const struct flow *flow, __u64 now)
{
	return (flow->value & FLOW_SEEN_MASK) ==
	       ((__u64)FLOW_ESTABLISHED << FLOW_STATE_SHIFT | now);
}

/*
 * Whether an event leaves the flow's entry as it is. A SYN does, if the flow is established or
 * closing: it does not prove that the connection is over. So does a packet without FIN or RST soon
 * after the end: it may be of the connection that has ended. The entry then keeps the time of the
 * end, so that a packet that comes much later is not taken for one of that connection.
 */
static __always_inline bool flow_ignores(const struct flow *flow, enum flow_event event, __u64 now)
{
	enum flow_state state = entry_state(flow->value);

	if (event == FLOW_OPENS)
		return is_established(state) || state == FLOW_CLOSING;
	return event == FLOW_CONTINUES && flow_lingers(flow, now);
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
	/* The next connection of a closing flow is counted by its second packet. */
	bool begins_again = from == FLOW_CLOSING && to == FLOW_ESTABLISHED;
	__u64 more = 0;

	if (begins_again || (to == FLOW_NEW && from != FLOW_NEW))
		__sync_fetch_and_add(&load->placed, 1);
	/* A new flow that loses its entry is lost; one that gets another state is answered. */
	if (from == FLOW_NEW && to == FLOW_FREE)
		__sync_fetch_and_add(&load->lost, 1);
	else if (begins_again || (from == FLOW_NEW && to != FLOW_NEW))
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

/* Whether a change enters a new flow, in a free entry or in place of another new flow. The state
 * bits are read directly: entry_state() has more branches, for states that do not matter here. */
static __always_inline bool begins_flow(__u64 old, __u64 new)
{
	return is_replaced(old, new) && entry_state(new) == FLOW_NEW &&
	       (!old || (old >> FLOW_STATE_SHIFT & FLOW_STATE_MASK) == FLOW_NEW);
}

/* Counts a change for which begins_flow() is true, as note_change() does if no service has a
 * ranking. Inlined: under `hash`, most SYNs of new flows make such a change. */
static __always_inline void count_new_flow(__u64 old, __u64 new)
{
	struct load *load = load_at(entry_server(new));

	if (load)
		__sync_fetch_and_add(&load->placed, 1);
	load = load_at(entry_server(old));
	if (load && old)
		__sync_fetch_and_add(&load->lost, 1);
}

/* Replaces the value of an entry. False: the entry does not have the old value any more. */
static __always_inline bool entry_swap(__u64 *entry, __u64 old, __u64 new)
{
	return __sync_val_compare_and_swap(entry, old, new) == old;
}

/*
 * Changes an entry that has the old value. False: another core was faster, and the entry is as that
 * core left it. The data path makes every change of an entry's state, age or server here, and the
 * sweep makes its changes by sweep_entry(). The sweep and note_change() count by count_states(),
 * and count_new_flow() counts the same for one kind of change. So the loads of servers always agree
 * with the entries of both flow tables, except for changes under way.
 */
static __always_inline bool entry_change(__u64 *entry, __u64 old, __u64 new)
{
	if (!entry_swap(entry, old, new))
		return false;
	if (dry_run)
		return true;
	/* Otherwise the verifier walks what follows once for each state of the old entry. */
	old = forget(old);
	new = forget(new);
	if (!has_features(PLACEMENTS_RANKING) && begins_flow(old, new))
		count_new_flow(old, new);
	else
		note_change(old, new);
	return true;
}

/* Returns the way of the flow's bucket whose entry has a value, or -1. */
static __always_inline int find_way(const struct flow *flow, __u64 value)
{
#pragma nounroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		int way = flow_way(flow->signature, i);

		if (entry_read(flow->bucket, way) == value)
			return way;
	}
	return -1;
}

/* Changes the entry in a way of the flow's bucket. False, without a change: `way` is -1, or the
 * entry does not have the old value any more. */
static __always_inline bool change_way(const struct flow *flow, int way, __u64 old, __u64 new)
{
	return way >= 0 &&
	       entry_change(&flow->bucket->entry[way & (FLOWS_PER_BUCKET - 1)], old, new);
}

/* Changes the entry of the flow's bucket that has the old value. False: there is no such entry any
 * more. */
static __always_inline bool flow_transition(const struct flow *flow, __u64 old, __u64 new)
{
	return change_way(flow, find_way(flow, old), old, new);
}

/* Notes an event of a known flow that stays with its server. It writes only if the state or the
 * tick differs from that in the entry, so that cores can share the cache line. True: it has changed
 * the entry. */
static __always_inline bool flow_renew(struct flow *flow, enum flow_event event, __u64 now)
{
	__u64 seen = seen_bits(flow_next(entry_state(flow->value), event), now);
	__u64 changed = (flow->value ^ seen) & FLOW_SEEN_MASK;

	return changed && !flow_ignores(flow, event, now) &&
	       flow_transition(flow, flow->value, flow->value ^ changed);
}

#define FLOW_RANK_IDLE (FLOW_MIN_IDLE + FLOW_MAX_LEAD) /* the lowest rank that is replaced */

/*
 * How readily an entry that is not free is replaced: the older the sooner, and a new or closed one
 * sooner than any other. An entry that is ahead of the clock has the lowest rank of its kind.
 * Without branches: otherwise the verifier walks the next entries once for each state.
 */
static __always_inline __u64 entry_rank(__u64 value, __u64 now)
{
	__u64 odd = value >> FLOW_STATE_SHIFT & 1;		 /* new, closed or closing */
	__u64 ended = odd & value >> (FLOW_STATE_SHIFT + 1);	 /* closed or closing */
	__u64 closing = ended & value >> (FLOW_STATE_SHIFT - 1); /* FLOW_BY_CLIENT is set too */
	__u64 age = (now + FLOW_MAX_LEAD - value) & FLOW_TIME_MASK >> ended;

	return (odd ^ closing) << FLOW_STATE_SHIFT | age;
}

/*
 * Finds the entry that a new flow replaces: a free one, or else that of the highest rank. Returns
 * its way, and its value in `old`. Returns -1 if no entry may be replaced: none is of a new or
 * closed flow, and none was idle for FLOW_MIN_IDLE. With `spares_own`, an entry that another core
 * has made for the same flow since the lookup is not replaced.
 */
static __always_inline int find_replaceable(const struct flow *flow, __u64 now, bool spares_own,
					    __u64 *old)
{
	__u64 best = FLOW_RANK_IDLE - 1;
	int found = -1;

#pragma nounroll
	for (int i = 0; i < FLOWS_PER_BUCKET; i++) {
		int way = flow_way(flow->signature, i);
		__u64 value = entry_read(flow->bucket, way);
		__u64 rank = entry_rank(value, now);

		if (!value) {
			*old = 0;
			return way;
		}
		if (spares_own && entry_is_own(flow, value))
			continue;
		if (rank > best) {
			best = rank;
			found = way;
			*old = value;
		}
		/* Otherwise the compiler would keep more on the stack. */
		barrier_var(best);
	}
	return found;
}

/* Enters a flow: in the place of its own entry, if the lookup found one, or else where
 * find_replaceable() says. False, without a change: the flow has no bucket, no entry may be
 * replaced, or another core was faster. */
static __always_inline bool flow_enter(struct flow *flow, __u32 server, enum flow_state state,
				       __u64 now, bool spares_own)
{
	__u64 old = flow->value;
	int way;

	if (!flow->bucket)
		return false;
	way = old ? find_way(flow, old) : find_replaceable(flow, now, spares_own, &old);
	return change_way(flow, way, old, entry_value(flow->signature, server, state, now));
}

#endif
