/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Handles Initial and 0-RTT packets of QUIC that are offered to this server. A connection begins
 * with several such packets: the ClientHello may need two datagrams, and clients repeat what is not
 * answered. All must come to one server, although each is offered by itself. No kernel socket tells
 * which connections of QUIC a server has. So every server remembers for half a minute what it has
 * decided about a connection, also if it has passed the connection on. As all packets of a
 * connection visit the same candidates in the same order, each of them then takes the path of the
 * first one (docs/understand/protocol.md, "Offers of QUIC").
 *
 * The table is set-associative: a cache line holds the eight decisions of a bucket, one word each.
 *
 *      63              44 43            28 27       16 15        0
 *     +------------------+----------------+-----------+-----------+
 *     |   flow           | connection ID  |   since   |  decision |
 *     +------------------+----------------+-----------+-----------+
 *
 * The bucket and the field `flow` are independent hashes of addresses and ports. They have keys, so
 * clients cannot choose flows that share a bucket. The field `connection ID` is a hash of the
 * beginning of the destination ID. It needs no key: it tells the connections of one client port
 * apart. A new decision replaces the oldest one of its bucket. Each word is written at once.
 */
#ifndef SEGUE_AGENT_INITIAL_H
#define SEGUE_AGENT_INITIAL_H

#include "flowtable.h"
#include "handshake.h"
#include "net/quic.h"

#define INITIALS_PER_BUCKET 8
#define INITIAL_BUCKET_BITS 15
#define INITIAL_FLOW_SHIFT 44
#define INITIAL_ID_SHIFT 28
#define INITIAL_SINCE_SHIFT 16
#define INITIAL_SINCE_MASK 0xfffULL
#define INITIAL_DECISION_MASK 0xffffULL
/* A tick is 2^27 ns, about 0.13 s. The field `since` wraps after nine minutes. */
#define INITIAL_TICK_SHIFT 27
/* How long a decision counts after the last packet that has followed it, in ticks: 30 s. Clients
 * repeat packets after a second, and then after twice the time before (RFC 9002 section 6.2). */
#define INITIAL_LIFETIME 224
/* How many octets of a client's first connection ID are hashed. It has at least as many (RFC 9000
 * section 7.2). */
#define INITIAL_ID_LENGTH 8

/* Decisions about a connection. */
#define INITIAL_TAKEN 1	    /* this server takes it */
#define INITIAL_PASSED_ON 2 /* it goes on to the next candidate */
/* It goes back to an earlier candidate. The low bits tell which one (mark_of). */
#define INITIAL_RETURNED 0x8000

struct initial_bucket {
	__u64 decision[INITIALS_PER_BUCKET];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << INITIAL_BUCKET_BITS);
	__uint(map_flags, BPF_F_MMAPABLE); /* aligns buckets with cache lines */
	__type(key, __u32);
	__type(value, struct initial_bucket);
} initials SEC(".maps");

/* Where the decision about a connection is, or would be. */
struct initial_place {
	struct initial_bucket *bucket;
	__u64 flow; /* the fields at their positions */
	__u64 id;
	__u32 now; /* ticks */
};

/* Finds the place of an Initial or 0-RTT packet. False: the packet is of another kind. */
static __always_inline bool find_initial(struct xdp_md *ctx, const struct packet *pkt,
					 struct initial_place *place)
{
	struct two_hashes hash;
	struct cursor at;
	__u64 id = 0;
	__u32 number;
	bool opens;

	move_to(&at, ctx, pkt);
	if (!enter_udp(&at) || !find_connection_id(&at, &opens) || !opens)
		return false;
	if (at.left >= INITIAL_ID_LENGTH &&
	    bpf_xdp_load_bytes(ctx, at.pos - frame_start(ctx), &id, sizeof(id)))
		return false;
	hash = multilinear_twice((const __u32 *)&pkt->key, AGENT_FLOW_WORDS, agent_keys);
	number = place_of(hash.first) >> (64 - INITIAL_BUCKET_BITS);
	place->bucket = bpf_map_lookup_elem(&initials, &number);
	place->flow = hash.second >> INITIAL_FLOW_SHIFT << INITIAL_FLOW_SHIFT;
	place->id = spread(id) >> 48 << INITIAL_ID_SHIFT;
	place->now = bpf_ktime_get_coarse_ns() >> INITIAL_TICK_SHIFT;
	return place->bucket;
}

/* The age of a decision in ticks. */
static __always_inline __u32 initial_age(__u64 word, __u32 now)
{
	return (now - (__u32)(word >> INITIAL_SINCE_SHIFT)) & INITIAL_SINCE_MASK;
}

/* What this server has decided about the connection; 0: nothing that still counts. */
static __always_inline __u32 decided(const struct initial_place *place)
{
	__u64 wanted = place->flow | place->id;

#pragma unroll
	for (int i = 0; i < INITIALS_PER_BUCKET; i++) {
		__u64 word = *(const volatile __u64 *)&place->bucket->decision[i];

		if ((word ^ wanted) >> INITIAL_ID_SHIFT == 0 &&
		    initial_age(word, place->now) < INITIAL_LIFETIME)
			return word & INITIAL_DECISION_MASK;
	}
	return 0;
}

/* Whether this server has lately taken a connection with the same addresses and ports. */
static __always_inline bool has_taken(const struct initial_place *place)
{
#pragma unroll
	for (int i = 0; i < INITIALS_PER_BUCKET; i++) {
		__u64 word = *(const volatile __u64 *)&place->bucket->decision[i];

		if ((word ^ place->flow) >> INITIAL_FLOW_SHIFT == 0 &&
		    (word & INITIAL_DECISION_MASK) == INITIAL_TAKEN &&
		    initial_age(word, place->now) < INITIAL_LIFETIME)
			return true;
	}
	return false;
}

/* Remembers a decision, in the place of one about the same connection or else of the oldest one. A
 * dry run remembers nothing. */
static __always_inline void remember(const struct initial_place *place, __u32 decision)
{
	__u64 wanted = place->flow | place->id, *best = &place->bucket->decision[0];
	__u32 highest = 0;

	if (dry_run)
		return;
#pragma unroll
	for (int i = 0; i < INITIALS_PER_BUCKET; i++) {
		__u64 *at = &place->bucket->decision[i];
		__u64 word = *(volatile __u64 *)at;
		__u32 rank = word ? initial_age(word, place->now) : INITIAL_SINCE_MASK;

		if ((word ^ wanted) >> INITIAL_ID_SHIFT == 0)
			rank = INITIAL_SINCE_MASK + 1;
		if (rank > highest) {
			highest = rank;
			best = at;
		}
	}
	*(volatile __u64 *)best =
		wanted | (place->now & INITIAL_SINCE_MASK) << INITIAL_SINCE_SHIFT | decision;
}

/* Tells a candidate of a list apart from the others: its column, and a hash of its locator, because
 * several candidates may have no column. */
static __always_inline __u32 mark_of(const struct in6_addr *sid)
{
	__u64 argument = bpf_be64_to_cpu(low_bits_of(sid));

	return (argument >> (LOAD_COLUMN_SHIFT - 1) & 0xf) << 11 | spread(locator_of(sid)) >> 53;
}

/* Hands a connection back to the same earlier candidate as before. False: the list does not have
 * that candidate any more. Not inlined: the verifier walks it once. */
__noinline int hand_back_again(struct xdp_md *ctx, const struct envelope *envelope, __u32 decision)
{
	struct in6_addr entry;

	if (!envelope || envelope->hop_limit <= 1)
		return false;
	for (__u32 i = 0; i < MAX_EARLIER; i++) {
		__u32 index = envelope->last_entry - i;
		__u64 *low = (__u64 *)&entry + 1;

		if (i >= envelope->last_entry || index <= envelope->segments_left)
			break;
		if (!load_entry(ctx, envelope, index, &entry) || !is_offer(&entry) ||
		    (INITIAL_RETURNED | mark_of(&entry)) != decision)
			continue;
		*low = sid_low_with_function(*low, SID_CONNECT_FORCE);
		return store_own_entry(ctx, envelope, &entry);
	}
	return false;
}

/* What to remember about a connection that take_connection() has decided about. This server's own
 * entry of the list names the candidate to which it has handed the connection back. */
static __always_inline __u32 decision_of(struct xdp_md *ctx, const struct envelope *envelope,
					 enum agent_reason why)
{
	struct in6_addr entry;

	if (why == AGENT_NONE)
		return INITIAL_TAKEN;
	if (why == AGENT_NEXT_RETURNED &&
	    load_entry(ctx, envelope, envelope->segments_left, &entry))
		return INITIAL_RETURNED | mark_of(&entry);
	return INITIAL_PASSED_ON;
}

/* What recall_initial() returns if this server has to decide. */
#define INITIAL_UNDECIDED -1

/* Follows an earlier decision about a connection, as far as the list permits it. The list may lead
 * elsewhere than before if the candidates have changed. */
static __always_inline int follow_decision(struct xdp_md *ctx, const struct envelope *envelope,
					   __u32 decision)
{
	if (decision == INITIAL_TAKEN)
		return AGENT_NONE;
	if (function_of(envelope) == SID_CONNECT_FORCE)
		return INITIAL_UNDECIDED;
	if (!is_last_server(envelope))
		return decision == INITIAL_PASSED_ON ? AGENT_NEXT_REFUSED : INITIAL_UNDECIDED;
	return decision & INITIAL_RETURNED && hand_back_again(ctx, envelope, decision)
		       ? AGENT_NEXT_RETURNED
		       : INITIAL_UNDECIDED;
}

/*
 * Handles a datagram as far as this server does not have to decide about a new connection. Returns
 * a reason, or INITIAL_UNDECIDED. Not inlined: it has a stack of its own.
 */
__noinline int recall_initial(struct xdp_md *ctx, const struct envelope *envelope,
			      const struct packet *pkt)
{
	struct initial_place place;
	__u32 decision;
	int why;

	if (!envelope || !pkt)
		return AGENT_DROP_TRANSPORT;
	if (!find_initial(ctx, pkt, &place))
		return AGENT_DROP_TCP_FLAGS;
	if (function_of(envelope) == SID_RECOVER || function_of(envelope) == SID_STEER) {
		if (has_taken(&place))
			return AGENT_NONE;
		return is_last_server(envelope) ? AGENT_DROP_NOT_LOCAL : AGENT_NEXT_NOT_LOCAL;
	}
	decision = decided(&place);
	why = follow_decision(ctx, envelope, decision);
	if (why != INITIAL_UNDECIDED)
		remember(&place, decision);
	return why;
}

/* Remembers what take_connection() has decided. Not inlined: it has a stack of its own. */
__noinline int remember_initial(struct xdp_md *ctx, const struct envelope *envelope,
				const struct packet *pkt, __u32 why)
{
	struct initial_place place;

	if (envelope && pkt && find_initial(ctx, pkt, &place))
		remember(&place, decision_of(ctx, envelope, why));
	return 0;
}

/*
 * Handles a datagram of UDP with a function about flows. The reason is none if it is to be
 * delivered.
 *
 *	- connect-avail and connect-force: only Initial and 0-RTT packets are offered. The first one
 *	  of a connection is decided about as a SYN, and the others follow it.
 *	- recover-stickiness and steer: the ID of the datagram names this server. This server takes it
 *	  if it has lately taken a connection with the same addresses and ports. So no client gets a
 *	  server of its choice by the ID in its first packet.
 */
static __always_inline enum agent_reason
handle_initial(struct xdp_md *ctx, const struct envelope *envelope, const struct packet *pkt)
{
	int why = recall_initial(ctx, envelope, pkt), kinds;
	struct backlog backlog = {};

	if (why != INITIAL_UNDECIDED)
		return why;
	kinds = receives_udp(ctx, &pkt->key) ? SOCKET_LISTENING : SOCKET_NONE;
	why = take_connection(ctx, envelope, pkt, kinds, &backlog);
	remember_initial(ctx, envelope, pkt, why);
	return why;
}

#endif
