/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counts the sockets with a cookie, for the test.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The kernel's argument: a pointer is 64 bits wide on all hosts. */
struct bpf_iter__bpf_sk_storage_map {
	__u64 meta;
	__u64 map;
	__u64 socket;
	__u64 value; /* 0: the end */
};

volatile __u32 sockets;

/* Runs for each storage, and once more without a value at the end. */
SEC("iter/bpf_sk_storage_map")
int count_storages(struct bpf_iter__bpf_sk_storage_map *at)
{
	if (at->value)
		sockets++;
	return 0;
}
