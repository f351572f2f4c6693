/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The programs around the balancer in a measurement of its throughput. Other programs take the
 * balancer's place, to measure the cost of what surrounds it.
 */
#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} arrived SEC(".maps");

const volatile __u32 egress; /* set at load */

/* Receives the packets at the end of each path. */
SEC("xdp")
int sink(struct xdp_md *ctx)
{
	__u32 key = 0;
	__u64 *count = bpf_map_lookup_elem(&arrived, &key);

	if (count)
		(*count)++;
	return XDP_DROP;
}

/* The least work that sends a packet on. */
SEC("xdp")
int pass_on(struct xdp_md *ctx)
{
	return bpf_redirect(egress, 0);
}
