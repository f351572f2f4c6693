/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Affinity: which part of a flow selects its bucket. A service with affinity leaves out the
 * client's port, and as many of the last bits of the client's address as configured. So all
 * connections of a client, or of a prefix of clients, have the same row of candidates. Services
 * that share their affinity also leave out the protocol and the port of the VIP.
 *
 * Only buckets are selected in this way. Flow tables and hints know each flow by all of its key.
 */
#ifndef SEGUE_BALANCER_TABLES_AFFINITY_H
#define SEGUE_BALANCER_TABLES_AFFINITY_H

#include "net/hash.h"
#include "net/parse.h"
#include "balancer/types.h"

/* The keys of the hash that selects buckets. All balancers that share a seed have the same. User
 * space sets them at load. */
const volatile __u64 bucket_keys[TUPLE_WORDS + 1];

/* Clears the last bits of a half of an address: `count` of them, or all if count exceeds 63. */
static __always_inline __be64 clear_last_bits(__be64 half, __u32 count)
{
	return count < 64 ? half & bpf_cpu_to_be64(~0ULL << count) : 0;
}

/* The part of a sum of multilinear() for two words. */
static __always_inline __u64 product_of(__u64 words, const volatile __u64 *keys)
{
	return (keys[0] + (__u32)words) * (keys[1] + (words >> 32));
}

/*
 * The hash of the part of a flow that selects its bucket, by an affinity other than 0. It is
 * hash_of() of a flow with 0 in place of all other parts. Not inlined: many functions need it, and
 * few services do. It works without a copy of the flow, because it is called where little of the
 * stack is left.
 */
__noinline __u32 affine_hash(const struct flow_key *flow, __u32 affinity)
{
	const __u64 *words = (const __u64 *)flow;
	__u32 cut = (affinity & AFFINITY_PREFIX) - 1;
	__u64 sum = bucket_keys[TUPLE_WORDS];

	if (!flow)
		return 0;
	if (!is_ipv4(&flow->source))
		cut *= 4;
	sum += product_of(clear_last_bits(words[0], cut < 64 ? 0 : cut - 64), bucket_keys);
	sum += product_of(clear_last_bits(words[1], cut), bucket_keys + 2);
	sum += product_of(words[2], bucket_keys + 4);
	sum += product_of(words[3], bucket_keys + 6);
	/* The ports and the protocol, without the client's port. */
	sum += product_of(affinity & AFFINITY_SHARED ? 0 : words[4] & ~0xffffULL, bucket_keys + 8);
	return mix(sum >> 32);
}

#endif
