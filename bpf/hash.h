/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Multilinear-HM hashing (Lemire and Kaser, "Strongly universal string hashing
 * is fast", 2014): for random keys, any two flows get independent, uniform
 * 32-bit values. Collision probabilities are therefore exact whatever flows a
 * client chooses, as long as it does not know the keys.
 */
#ifndef SEGUE_HASH_H
#define SEGUE_HASH_H

#include "types.h"

/*
 * The sum is linear in the ports, so those of one client, taken in turn, may fall
 * on few buckets. Mixing the bits spreads them, and as it is a bijection (the
 * finalizer of MurmurHash3) the probabilities above stay what they are.
 */
static __always_inline __u32 mix(__u32 hash)
{
	hash ^= hash >> 16;
	hash *= 0x85ebca6b;
	hash ^= hash >> 13;
	hash *= 0xc2b2ae35;
	return hash ^ hash >> 16;
}

static __always_inline __u32 hash_flow(const struct flow_key *flow,
				       const volatile __u64 keys[HASH_KEYS])
{
	const __u32 *word = (const __u32 *)flow;
	__u64 sum = keys[FLOW_KEY_WORDS];

#pragma unroll
	for (int i = 0; i < FLOW_KEY_WORDS; i += 2)
		sum += (keys[i] + word[i]) * (keys[i + 1] + word[i + 1]);
	return mix(sum >> 32);
}

#endif
