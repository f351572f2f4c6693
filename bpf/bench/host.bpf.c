/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Gives the program under test one packet after another. A test run repeats a program on the
 * packet as the last repetition left it. So this program writes the whole packet anew each time,
 * with another flow.
 */
#include "net/parse.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define MAX_FRAME 256

enum order {
	ORDER_RANDOM,	/* each time any flow from 0 to flows-1 */
	ORDER_IN_TURN,	/* all flows in turn, again and again */
	ORDER_IN_PAIRS, /* as ORDER_IN_TURN, with two packets of each flow */
	/* As ORDER_IN_TURN, with the packets of a whole connection of each flow
	 * (connection_flags). */
	ORDER_CONNECTIONS,
};

#define CONNECTION_PACKETS 3

struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} under_test SEC(".maps");

__u8 frame[MAX_FRAME]; /* the template of the packets */
volatile __u32 frame_length;
volatile __u32 flow_offset;  /* offset in the packet of the 32 bits that differ between flows */
volatile __u32 first_flow;   /* the value of these bits in flow 0 */
volatile __u32 flags_offset; /* offset of the TCP flags, for ORDER_CONNECTIONS */
volatile __u8 connection_flags[CONNECTION_PACKETS + 1]; /* the TCP flags of each packet */
volatile __u32 flows;
volatile __u32 order;	/* enum order */
volatile __u32 verdict; /* the verdict that the program should return */
volatile __u64 position;
volatile __u64 unexpected; /* count of other verdicts */

/* Returns the number of the next flow, by `order`. Random numbers are the high bits of a linear
 * congruential generator (multiplier: Steele and Vigna, 2021, table 7). No cache can predict
 * them. */
static __always_inline __u32 next_flow(void)
{
	if (order == ORDER_IN_TURN)
		return position++;
	if (order == ORDER_IN_PAIRS)
		return position++ / 2;
	if (order == ORDER_CONNECTIONS)
		return position++ / CONNECTION_PACKETS;
	position = position * 0xd1342543de82ef95ULL + 1;
	return (position >> 32) * flows >> 32;
}

/* Writes the next packet to the frame. False: user space has set impossible values. */
static __always_inline bool rebuild(struct xdp_md *ctx)
{
	__u32 length = frame_length & (MAX_FRAME - 1);
	long surplus = frame_end(ctx) - frame_start(ctx) - (long)length;
	__u32 offset = flow_offset;

	if (surplus && bpf_xdp_adjust_head(ctx, (int)surplus))
		return false;
	if (!length || offset > MAX_FRAME - sizeof(__u32))
		return false;
	if (order == ORDER_CONNECTIONS) {
		__u32 number = position % CONNECTION_PACKETS;

		barrier_var(number); /* the verifier does not know the range of a remainder */
		frame[flags_offset & (MAX_FRAME - 1)] =
			connection_flags[number & (sizeof(connection_flags) - 1)];
	}
	/* Changes the template, and not the packet after it was written: if a load is wider than
	 * the store just before it, the processor waits. Packets of a network card cause no such
	 * wait. */
	*(__be32 *)&frame[offset] = bpf_htonl(first_flow + next_flow());
	return !bpf_xdp_store_bytes(ctx, 0, frame, length);
}

/* A tail call in a subprogram returns to the caller of the subprogram. The result is volatile,
 * because the compiler would otherwise assume the value that the subprogram returns. */
__noinline int run_under_test(struct xdp_md *ctx)
{
	volatile int none = XDP_ABORTED;

	bpf_tail_call(ctx, &under_test, 0);
	return none;
}

/* Runs the program under test on the next packet, and checks its verdict. */
SEC("xdp")
int xdp_host(struct xdp_md *ctx)
{
	if (!rebuild(ctx))
		return XDP_ABORTED;
	if (run_under_test(ctx) != verdict)
		unexpected++;
	return XDP_PASS;
}
