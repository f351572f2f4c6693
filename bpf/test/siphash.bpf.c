/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Hashes messages of 0 to MAX_WORDS words, for the test.
 */
#include "net/siphash.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define MAX_WORDS 7

struct siphash_key key;
__u64 message[MAX_WORDS];
__u64 hashes[MAX_WORDS + 1];

SEC("syscall")
int hash_all(void *ctx)
{
#pragma clang loop unroll(full)
	for (int words = 0; words <= MAX_WORDS; words++)
		hashes[words] = siphash(&key, message, words);
	return 0;
}
