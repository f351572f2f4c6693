/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * SipHash-2-4, a keyed hash: Aumasson, Bernstein, "SipHash: a fast short-input PRF", 2012, section
 * 2. Messages are whole 64-bit words only.
 */
#ifndef SEGUE_NET_SIPHASH_H
#define SEGUE_NET_SIPHASH_H

#include "types.h"

/* The key in memory order: two little-endian words, as the paper reads it. */
struct siphash_key {
	__u64 word[2];
};

static __always_inline __u64 rotate_left(__u64 word, __u32 bits)
{
	return word << bits | word >> (64 - bits);
}

/* The round function of SipHash. */
static __always_inline void sip_round(__u64 v[4])
{
	v[0] += v[1];
	v[1] = rotate_left(v[1], 13) ^ v[0];
	v[0] = rotate_left(v[0], 32);
	v[2] += v[3];
	v[3] = rotate_left(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotate_left(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotate_left(v[1], 17) ^ v[2];
	v[2] = rotate_left(v[2], 32);
}

/* Mixes a word of the message into the state. */
static __always_inline void sip_absorb(__u64 v[4], __u64 word)
{
	v[3] ^= word;
	sip_round(v);
	sip_round(v);
	v[0] ^= word;
}

/* Returns the hash of a message of `count` words of 64 bits. `count` must be a constant. */
static __always_inline __u64 siphash(const struct siphash_key *key, const __u64 *message,
				     __u32 count)
{
	__u64 v[4] = {
		key->word[0] ^ 0x736f6d6570736575ULL,
		key->word[1] ^ 0x646f72616e646f6dULL,
		key->word[0] ^ 0x6c7967656e657261ULL,
		key->word[1] ^ 0x7465646279746573ULL,
	};

#pragma clang loop unroll(full)
	for (__u32 i = 0; i < count; i++)
		sip_absorb(v, message[i]);
	/* The last word is the message's length in bytes, modulo 256. */
	sip_absorb(v, (__u64)(count * sizeof(*message)) << 56);
	v[2] ^= 0xff;
#pragma clang loop unroll(full)
	for (int i = 0; i < 4; i++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

#endif
