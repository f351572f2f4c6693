/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Multilinear-HM hashing (Lemire and Kaser, "Strongly universal string hashing
 * is fast", 2014): for random keys, any two inputs get independent, uniform
 * values in the 33 highest bits of 64. Collision probabilities are therefore exact
 * whatever flows a client chooses, as long as it does not know the keys.
 */
#ifndef SEGUE_NET_HASH_H
#define SEGUE_NET_HASH_H

#include "types.h"

/*
 * Multilinear hashing is linear in the ports, so the consecutive ports of one client may fall
 * into few buckets. Mixing the bits spreads them. The mixer is a bijection (the finalizer of
 * MurmurHash3), so it leaves collision probabilities as they are.
 */
static __always_inline __u32 mix(__u32 hash)
{
	hash ^= hash >> 16;
	hash *= 0x85ebca6b;
	hash ^= hash >> 13;
	hash *= 0xc2b2ae35;
	return hash ^ hash >> 16;
}

/* Hashes `size` words, an even number, with `size` + 1 keys. */
static __always_inline __u64 multilinear(const __u32 *word, int size, const volatile __u64 *keys)
{
	__u64 sum = keys[size];

#pragma unroll
	for (int i = 0; i < size; i += 2)
		sum += (keys[i] + word[i]) * (keys[i + 1] + word[i + 1]);
	return sum;
}

/* The golden ratio of 2^64: Knuth, "The art of computer programming", volume 3, section 6.4. */
#define GOLDEN_RATIO 0x9e3779b97f4a7c15ULL

/*
 * A place in a table, given by the highest bits. `sum` is the sum of the key's 64-bit words, each
 * multiplied by an odd key (Dietzfelbinger et al., "A reliable randomized algorithm for the
 * closest-pair problem", 1997, section 2). Consecutive numbers have sums close to each other:
 * folding the sum before another multiplication spreads them.
 */
static __always_inline __u64 spread(__u64 sum)
{
	sum ^= sum >> 32;
	return sum * GOLDEN_RATIO;
}

#endif
