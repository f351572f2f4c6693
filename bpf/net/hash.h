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

/* Two independent hashes of one input. */
struct two_hashes {
	__u64 first;
	__u64 second;
};

/* Hashes `size` words twice, with `size` + 4 keys. It reads each word once. */
static __always_inline struct two_hashes multilinear_twice(const __u32 *word, int size,
							   const volatile __u64 *keys)
{
	struct two_hashes sum = { keys[0], keys[size + 3] };

#pragma unroll
	for (int i = 0; i < size; i += 2) {
		__u64 even = word[i], odd = word[i + 1];

		sum.first += (keys[i + 1] + even) * (keys[i + 2] + odd);
		sum.second += (keys[i + 3] + even) * (keys[i + 4] + odd);
		/* Otherwise the compiler would compute all factors first, and keep them on the
		 * stack. */
		barrier_var(sum.first);
		barrier_var(sum.second);
	}
	return sum;
}

/*
 * Replaces the high half x of `sum` by x(2x + 1). That is a permutation (Rivest et al., "The RC6
 * block cipher", 1998, section 2.3), so it leaves collision probabilities as they are. It is not
 * linear, so it spreads sums that are linear in the ports.
 */
static __always_inline __u64 place_of(__u64 sum)
{
	__u64 high = sum >> 32;

	return sum + (high * high << 33);
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
