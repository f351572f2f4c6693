/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Hashes of values that clients choose.
 *
 * Multilinear-HM (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 4):
 * for random keys, any two different inputs get independent, uniform values in the 33 highest bits
 * of 64. So any two of them share the n highest bits with a probability of 2^-n (n <= 33),
 * whichever inputs a client chooses without knowing the keys.
 *
 * Two hashes of one input are independent of each other, too, if the keys of the second one are
 * those of the first one, two further on, and the added keys differ (Toeplitz construction: Black
 * et al., "UMAC: fast and secure message authentication", 1999, section 4).
 */
#ifndef SEGUE_NET_HASH_H
#define SEGUE_NET_HASH_H

#include "types.h"

/*
 * Multilinear hashing is linear in the ports, so with some keys the consecutive ports of one client
 * fall into few buckets. Mixing the bits spreads them. The mixer is a bijection (the finalizer of
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

/* Hashes `size` words, an even number, with as many keys and the key `added`. */
static __always_inline __u64 multilinear(const __u32 *word, int size, const volatile __u64 *keys,
					 __u64 added)
{
	__u64 sum = added;

#pragma unroll
	for (int i = 0; i < size; i += 2)
		sum += (keys[i] + word[i]) * (keys[i + 1] + word[i + 1]);
	return sum;
}

static __always_inline __u64 place_of(__u64 sum)
{
	__u32 high = sum >> 32, odd = (__u32)sum | 1;

	high ^= high >> 16;
	return (__u64)(high * odd) << 32 | odd;
}

/* The golden ratio of 2^64: Knuth, "The art of computer programming", volume 3, section 6.4. */
#define GOLDEN_RATIO 0x9e3779b97f4a7c15ULL

/*
 * A place for values that no client chooses. `sum` is the sum of the key's 64-bit words, each
 * multiplied by an odd key. Consecutive numbers have sums close to each other: folding the sum
 * before another multiplication spreads them. But words that differ in their highest bits only
 * have sums that differ there only, whatever the keys are. So clients could choose values that
 * share a place.
 */
static __always_inline __u64 spread(__u64 sum)
{
	sum ^= sum >> 32;
	return sum * GOLDEN_RATIO;
}

#endif
