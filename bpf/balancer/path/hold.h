/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Later fragments that come before the first one of their packet. Only the first one has the ports,
 * and XDP cannot keep a frame. So user space holds copies of such fragments for a short time. When
 * the first fragment has passed, user space runs xdp_lb with the copies, in their order.
 */
#ifndef SEGUE_BALANCER_PATH_HOLD_H
#define SEGUE_BALANCER_PATH_HOLD_H

#include "balancer/decision.h"
#include "balancer/tables/flowtable.h"
#include "net/hash.h"
#include "net/host.h"
#include "net/token.h"
#include "balancer/stats.h"

/* Which packet a fragment is of: RFC 791 section 3.2, RFC 8200 section 4.5. */
struct fragment_key {
	struct in6_addr source;
	struct in6_addr destination;
	__be32 identification;
	__u8 protocol; /* IPv4 only */
	__u8 pad[3];
};

/* The part of the flow key that only the first fragment has. */
struct fragment_flow {
	/* When the first one passed, in ns of the coarse monotonic clock; 0: it is awaited. */
	__u64 seen;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 pad[3];
};

#define MAX_FRAGMENTED 65536

/* The flows of fragmented packets. The oldest entry is evicted, so a flood of fragments takes no
 * more memory. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_FRAGMENTED);
	__type(key, struct fragment_key);
	__type(value, struct fragment_flow);
} fragments SEC(".maps");

/* Bytes of the longest frame that is held. All frames of a link with an MTU of 1500 bytes are
 * shorter. */
#define HELD_FRAME 1536

/* What user space gets: a fragment to hold, or the news that a packet's first one has passed. */
struct held_fragment {
	struct fragment_key key;
	__u32 ifindex; /* of the interface on which the frame arrived */
	__u32 length;  /* of the frame; 0: the first fragment has passed, and there is no frame */
	__u8 frame[HELD_FRAME];
};

/* What user space has not read yet. There is room for more than a thousand fragments. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 2 << 20); /* bytes */
} held_fragments SEC(".maps");

/* How many fragments are held, for all sources together that share a budget (hold_budget_of). */
#define HELD_PER_SECOND 128
#define HELD_BURST 128
#define HOLD_BUDGET_BITS 12

/* Token buckets (net/token.h) by the prefix of the source. So a flood of fragments from one network
 * leaves room for the fragments of others. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1 << HOLD_BUDGET_BITS);
	__type(key, __u32);
	__type(value, __u64);
} hold_budgets SEC(".maps");

/* How many fragments a core gives to user space, whatever their sources. User space takes a few
 * microseconds for each. */
#define HELD_BY_CORE_PER_SECOND 10000
#define HELD_BY_CORE_BURST 2000

/* The token bucket of each core. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} hold_by_core SEC(".maps");

/* The budget of a source: the /48 of an IPv6 address, which is the most that a site has (RFC 6177),
 * or the /24 of an IPv4 address. Senders cannot tell which prefixes share a budget. */
static __always_inline __u32 hold_budget_of(const struct in6_addr *source)
{
	__u32 words[2] = { source->s6_addr32[0], source->s6_addr32[1] & bpf_htonl(0xffff0000) };

	if (is_ipv4(source)) {
		words[0] = source->s6_addr32[2];
		words[1] = source->s6_addr32[3] & bpf_htonl(0xffffff00);
	}
	return multilinear(words, 2, flow_keys + 1, flow_keys[0]) >> (64 - HOLD_BUDGET_BITS);
}

/* Takes a token of the source's budget, and one of the core. False: a rate limit is exceeded. */
static __always_inline bool may_hold_now(const struct in6_addr *source)
{
	__u32 budget = hold_budget_of(source), core = 0;

	return take_token_of(bpf_map_lookup_elem(&hold_budgets, &budget),
			     1000000000ULL / HELD_PER_SECOND, HELD_BURST) &&
	       take_token_of(bpf_map_lookup_elem(&hold_by_core, &core),
			     1000000000ULL / HELD_BY_CORE_PER_SECOND, HELD_BY_CORE_BURST);
}

/* The source of a frame that user space has held, in memory order: 02:'h':'e':'l':'d':0. It is no
 * host's address. */
#define HELD_SOURCE 0x00646c656802ULL

/* Whether user space runs the program with a fragment that it has held. */
static __always_inline bool was_held(const struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);

	return (void *)(ethernet + 1) <= frame_end(ctx) &&
	       (*(const __u64 *)ethernet->h_source ^ HELD_SOURCE) << 16 == 0;
}

/* Checks whether user space may get a later fragment, and takes a token of the source and one of
 * the core. Returns LB_NONE if it may (in a dry run LB_TAKE_FRAGMENT), else the reason of the drop.
 * Not inlined: see read_fragment. */
__noinline int may_hold(struct xdp_md *ctx, const struct fragment_key *key)
{
	__u64 length = frame_end(ctx) - frame_start(ctx);

	if (!key || was_held(ctx) || length < ETH_HLEN || length > HELD_FRAME)
		return LB_DROP_FRAGMENT_UNKNOWN;
	if (!may_hold_now(&key->source))
		return LB_DROP_FRAGMENT_ROOM;
	return dry_run ? LB_TAKE_FRAGMENT : LB_NONE;
}

/* Gives a later fragment to user space (LB_TAKE_FRAGMENT), or returns the reason of the drop. Not
 * inlined: see read_fragment. */
__noinline int hold_fragment(struct xdp_md *ctx, const struct fragment_key *key)
{
	__u64 payload = frame_end(ctx) - frame_start(ctx) - ETH_HLEN;
	struct held_fragment *held;

	/* Otherwise the compiler compares another register than the one that it passes on, and
	 * Linux 6.1 does not know that the length is bounded. */
	barrier_var(payload);
	if (!key || payload > HELD_FRAME - ETH_HLEN)
		return LB_DROP_FRAGMENT_UNKNOWN;
	held = bpf_ringbuf_reserve(&held_fragments, sizeof(*held), 0);
	if (!held)
		return LB_DROP_FRAGMENT_ROOM;
	held->key = *key;
	held->ifindex = ctx->ingress_ifindex;
	held->length = payload + ETH_HLEN;
	if (bpf_xdp_load_bytes(ctx, 0, held->frame, payload + ETH_HLEN)) {
		bpf_ringbuf_discard(held, 0);
		return LB_DROP_FRAGMENT_UNKNOWN;
	}
	bpf_ringbuf_submit(held, 0);
	return LB_TAKE_FRAGMENT;
}

/* Tells user space that the first fragment of a packet has passed. If the ring buffer is full, user
 * space finds the entry in `fragments` later. Not inlined: see read_fragment. */
__noinline int release_fragments(const struct fragment_key *key)
{
	struct held_fragment *news;

	if (!key || dry_run)
		return 0;
	/* The news has no frame. It is written in the ring buffer, because the stack has no room
	 * for a held_fragment. */
	news = bpf_ringbuf_reserve(&held_fragments, offsetof(struct held_fragment, frame), 0);
	if (!news)
		return 0;
	news->key = *key;
	news->ifindex = 0;
	news->length = 0;
	bpf_ringbuf_submit(news, 0);
	return 0;
}

#endif
