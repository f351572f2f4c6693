/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What surrounds the balancer when its throughput is measured, and what stands in
 * its place to find out what the surroundings cost.
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

/* The end of every way. */
SEC("xdp")
int sink(struct xdp_md *ctx)
{
	__u32 key = 0;
	__u64 *count = bpf_map_lookup_elem(&arrived, &key);

	if (count)
		(*count)++;
	return XDP_DROP;
}

/* The least that can be done to send a packet on. */
SEC("xdp")
int pass_on(struct xdp_md *ctx)
{
	return bpf_redirect(egress, 0);
}
