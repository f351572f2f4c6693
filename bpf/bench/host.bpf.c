/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Gives the program under test one packet after another. A test run repeats a
 * program on what the run before left of the packet, so every packet is written
 * anew here, with a flow of its own.
 */
#include "net/parse.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define MAX_FRAME 256

enum order {
	ORDER_RANDOM,	/* any flow of 0..flows-1, each time */
	ORDER_IN_TURN,	/* one after the other, without end */
	ORDER_IN_PAIRS, /* the same, two packets of each */
};

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} under_test SEC(".maps");

__u8 frame[MAX_FRAME];
volatile __u32 frame_length;
volatile __u32 flow_offset; /* of the 32 bits that tell the flows apart */
volatile __u32 first_flow;  /* those of flow 0 */
volatile __u32 flows;
volatile __u32 order;	/* enum order */
volatile __u32 verdict; /* that the program is to come to */
volatile __u64 position;
volatile __u64 unexpected; /* other verdicts */

/* Random flows by the high bits of a linear congruential generator: nothing that
 * a cache can foresee (multiplier: Steele and Vigna, 2021, table 7). */
static __always_inline __u32 next_flow(void)
{
	if (order == ORDER_IN_TURN)
		return position++;
	if (order == ORDER_IN_PAIRS)
		return position++ / 2;
	position = position * 0xd1342543de82ef95ULL + 1;
	return (position >> 32) * flows >> 32;
}

static __always_inline bool rebuild(struct xdp_md *ctx)
{
	__u32 length = frame_length & (MAX_FRAME - 1);
	long surplus = frame_end(ctx) - frame_start(ctx) - (long)length;
	__u32 offset = flow_offset;

	if (surplus && bpf_xdp_adjust_head(ctx, (int)surplus))
		return false;
	if (!length || offset > MAX_FRAME - sizeof(__u32))
		return false;
	/* In the template, not the packet: a load wider than a store just before it
	 * waits, and packets that come by a network card are not just stored. */
	*(__be32 *)&frame[offset] = bpf_htonl(first_flow + next_flow());
	return !bpf_xdp_store_bytes(ctx, 0, frame, length);
}

/* A tail call made in a subprogram returns to its caller. Volatile, or the
 * compiler knows what the subprogram returns. */
__noinline int run_under_test(struct xdp_md *ctx)
{
	volatile int none = XDP_ABORTED;

	bpf_tail_call(ctx, &under_test, 0);
	return none;
}

SEC("xdp")
int xdp_host(struct xdp_md *ctx)
{
	if (!rebuild(ctx))
		return XDP_ABORTED;
	if (run_under_test(ctx) != verdict)
		unexpected++;
	return XDP_PASS;
}
