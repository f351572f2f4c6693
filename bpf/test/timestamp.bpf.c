/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Finds the timestamps of each packet, and tells the test what they are.
 */
#include "net/timestamp.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

volatile bool found;
volatile __u32 value;
volatile __u32 echo;

SEC("xdp")
int xdp_timestamps(struct xdp_md *ctx)
{
	const struct timestamps *timestamps;
	struct packet pkt = {};

	found = false;
	if (parse(ctx, &pkt))
		return XDP_ABORTED;
	timestamps = find_timestamps(ctx, transport_offset(&pkt));
	if (!timestamps)
		return XDP_PASS;
	found = true;
	value = bpf_ntohl(timestamps->value);
	echo = bpf_ntohl(timestamps->echo);
	return XDP_PASS;
}
