/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A packet generator. BPF_PROG_TEST_RUN runs it with BPF_F_TEST_XDP_LIVE_FRAMES. It turns each
 * frame into a packet of one of many flows, and sends it.
 *
 * The kernel initialises a page of packet data only once. Later the page still contains what its
 * last frame contained (Documentation/bpf/bpf_prog_run.rst). So the program writes the whole
 * packet each time.
 */
#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAX_WORDS 16 /* 128 bytes */
/* The flows differ first in the port, from 1024 upwards, and then in the address. */
#define PORT_BITS 15
#define FIRST_PORT 1024
#define MAX_LATE 1000000 /* ns: a packet that is so late delays those after it (too_early) */

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The packet of the flow whose variable bits are all zero. Like all constants here, it is set at
 * load. Behind the Ethernet frame it is padded to a multiple of eight bytes. */
const volatile __u64 packet[MAX_WORDS];
const volatile __u32 packet_words;
/* Offsets in the frame, in bytes. */
const volatile __u32 source;	    /* the source address's last 32 bits */
const volatile __u32 port;	    /* the source port */
const volatile __u32 checksum;	    /* of TCP or UDP */
const volatile __u32 ipv4_checksum; /* 0: none */

const volatile __u32 host_mask; /* bits of the address that vary */
/* Number of flows. 0: the variable bits of each packet are random. */
const volatile __u32 flow_count;
const volatile bool in_turn; /* flows take turns; otherwise they are chosen at random */
/* The interface that sends the frames. 0: the host's own stack gets them, as if received. */
const volatile __u32 egress;
const volatile __u64 interval; /* minimum time from one packet to the next, in ns */

__u64 sent;
__u64 limit; /* number of frames to send */
__u64 due;   /* when to send the next packet, on the monotonic clock */

/* Chooses the number of the next packet's flow. Its low bits go into the source port, and the bits
 * above them into the source address. If flow_count is not set, all of these bits are random. */
static __always_inline __u64 next_flow(void)
{
	if (!flow_count)
		return (__u64)bpf_get_prandom_u32() << PORT_BITS |
		       (bpf_get_prandom_u32() & ((1 << PORT_BITS) - 1));
	if (in_turn)
		return sent % flow_count;
	return (__u64)bpf_get_prandom_u32() * flow_count >> 32;
}

/* Writes the packet of flow 0 to the frame. False: the frame is too short. */
static __always_inline bool write_packet(void *data, void *end)
{
#pragma unroll
	for (int i = 0; i < MAX_WORDS; i++) {
		__u64 *word = (__u64 *)data + i;

		if (i == packet_words)
			return true;
		if ((void *)(word + 1) > end)
			return false;
		*word = packet[i];
	}
	return true;
}

/* Returns a pointer to a field of the packet, or NULL if the field is beyond its end. */
static __always_inline void *field(void *data, void *end, __u32 offset, __u32 size)
{
	void *at = data + offset;

	return at + size <= end ? at : NULL;
}

/* Updates a checksum for a field that was zero (RFC 1624 equation 3). 0 and 0xffff are the same
 * sum, but in UDP a checksum of 0 means that there is none. */
static __always_inline __u16 update(__u16 sum, __u32 added)
{
	added += (__u16)~sum;
	added = (added & 0xffff) + (added >> 16);
	added = (added & 0xffff) + (added >> 16);
	return (__u16)~added ? ~added : 0xffff;
}

/* Updates a checksum in the frame (update). False: the frame is too short. */
static __always_inline bool add_to_checksum(void *data, void *end, __u32 offset, __u32 added)
{
	__u16 *sum = field(data, end, offset, sizeof(*sum));

	if (!sum)
		return false;
	*sum = update(*sum, added);
	return true;
}

/* Turns the packet of flow 0 in the frame into one of `flow`. False: the frame is too short. */
static __always_inline bool set_flow(void *data, void *end, __u64 flow)
{
	__be32 host = bpf_htonl((flow >> PORT_BITS) & host_mask);
	__be16 number = bpf_htons(FIRST_PORT + (flow & ((1 << PORT_BITS) - 1)));
	__u32 added = (host & 0xffff) + (host >> 16);
	__be32 *address = field(data, end, source, sizeof(*address));
	__be16 *source_port = field(data, end, port, sizeof(*source_port));

	if (!address || !source_port)
		return false;
	*address |= host;
	*source_port = number;
	if (ipv4_checksum && !add_to_checksum(data, end, ipv4_checksum, added))
		return false;
	return add_to_checksum(data, end, checksum, added + number);
}

/* Whether the next packet is due later. If it is due now, sets `due` for the packet after it. A
 * packet that is late by MAX_LATE also delays the packets after it. Otherwise all of these would
 * leave at once. */
static __always_inline bool too_early(void)
{
	__u64 now;

	if (!interval)
		return false;
	now = bpf_ktime_get_ns();
	if (now < due)
		return true;
	due = (now - due < MAX_LATE ? due : now) + interval;
	return false;
}

/* Turns the frame into the next packet, and sends it, if a packet is due. */
SEC("xdp")
int generate(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;

	if (sent >= limit || too_early())
		return XDP_DROP;
	if (!write_packet(data, end) || !set_flow(data, end, next_flow()))
		return XDP_ABORTED;
	sent++;
	return egress ? bpf_redirect(egress, 0) : XDP_PASS;
}
