/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Hashes of values that clients choose.
 *
 * Multilinear-HM (Lemire and Kaser, "Strongly universal string hashing is fast", 2014, section 4):
 * for random keys, any two different inputs get independent, uniform values in the 33 highest bits
 * of 64. So any two of them share the n highest bits with a probability of 2^-n (n <= 33),
 * whichever inputs a client chooses without knowing the keys.
 *
 * Two hashes of one input can share most of their keys: word i has key i in the first hash, and key
 * i + 2 in the second. The two hashes are independent of each other if the keys that are added to
 * the sums differ, too (Toeplitz construction: Black et al., "UMAC: fast and secure message
 * authentication", 1999, section 4).
 */
#ifndef SEGUE_NET_HASH_H
#define SEGUE_NET_HASH_H

#include "types.h"

/*
 * Multilinear hashing is linear in the ports, so with some keys the consecutive ports of one client
 * fall into few buckets. Mixing the bits spreads these ports over the buckets. The mixer is the
 * finalizer of MurmurHash3. It is a bijection, so it leaves collision probabilities as they are.
 */
static __always_inline __u32 mix(__u32 hash)
{
	hash ^= hash >> 16;
	hash *= 0x85ebca6b;
	hash ^= hash >> 13;
	hash *= 0xc2b2ae35;
	return hash ^ hash >> 16;
}

/* Hashes `size` words with `size` keys and the key `added`. `size` is even. */
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

/* Hashes `size` words twice, with `size` + 4 keys: the first one and the last one are the added
 * keys. It reads each word once. `size` is even. */
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
 * Turns a hash into a place, whose highest bits are the number of a bucket. It replaces the high
 * half x of `sum` by x(2x + 1). That is a permutation of the numbers of 32 bits (Rivest et al.,
 * "The RC6 block cipher", 1998, section 2.3), so it leaves collision probabilities as they are. It
 * is not linear, so it spreads hashes that are linear in the ports.
 */
static __always_inline __u64 place_of(__u64 sum)
{
	__u64 high = sum >> 32;

	return sum + (high * high << 33);
}

/* 2^64 divided by the golden ratio: Knuth, "The art of computer programming", volume 3, section
 * 6.4. */
#define GOLDEN_RATIO 0x9e3779b97f4a7c15ULL

/*
 * The place of a key that no client chooses. `sum` is the sum of the key's 64-bit words, each
 * multiplied by an odd number. Keys with consecutive numbers have sums close to each other. Folding
 * the sum before another multiplication spreads them.
 *
 * It does not suit keys that clients choose: if keys differ only in the highest bits of a word,
 * their sums differ only there, whatever the odd numbers are. So clients could choose keys that
 * share a place.
 */
static __always_inline __u64 spread(__u64 sum)
{
	sum ^= sum >> 32;
	return sum * GOLDEN_RATIO;
}

#endif
