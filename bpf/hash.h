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

static __always_inline __u32 hash_flow(const struct flow_key *flow,
				       const volatile __u64 keys[HASH_KEYS])
{
	const __u32 *word = (const __u32 *)flow;
	__u64 sum = keys[FLOW_KEY_WORDS];

#pragma unroll
	for (int i = 0; i < FLOW_KEY_WORDS; i += 2)
		sum += (keys[i] + word[i]) * (keys[i + 1] + word[i + 1]);
	return sum >> 32;
}

#endif
