/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The timestamps option of TCP (RFC 7323), which carries the cookies of stateless persistence: the
 * column of a flow's server, in the low bits of each timestamp that the server sends. The client
 * echoes the timestamp (docs/understand/protocol.md, "Cookies in TCP timestamps").
 */
#ifndef SEGUE_NET_TIMESTAMP_H
#define SEGUE_NET_TIMESTAMP_H

#include "load.h"
#include "parse.h"
#include "verifier.h"

#define TCP_OPTION_END 0
#define TCP_OPTION_NOP 1
#define TCP_OPTION_TIMESTAMPS 8
#define TCP_OPTION_TIMESTAMPS_SIZE 10
/* A TCP header has at most 40 bytes of options. */
#define MAX_TCP_OPTIONS_SIZE 40
/* NOP, NOP and the option's first bytes: how almost all hosts begin the options of packets other
 * than SYNs (RFC 7323 appendix A). */
#define TIMESTAMPS_FIRST 0x0101080a

struct timestamps {
	__be32 value; /* TSval: the sender's clock */
	__be32 echo; /* TSecr: the last value from the other side, if the packet has the ACK flag */
};

/* The bits of a timestamp that a cookie of `width` bits (0 to 3) takes, in host order. */
static __always_inline __u32 cookie_mask(__u32 width)
{
	return (1U << (width & LOAD_COOKIE_MASK)) - 1;
}

/*
 * The next two functions return the bytes at an offset in the frame, and the frame's end. Each
 * reads its pointer from the context anew: from an earlier read, clang 14 would copy only 32 bits
 * of the pointer. The mask is for the verifier: IP headers are shorter.
 */
static __always_inline void *bytes_at(const struct xdp_md *ctx, __u32 offset)
{
	return (void *)(long)((const volatile struct xdp_md *)ctx)->data + (offset & 0x7fff);
}

static __always_inline const void *bytes_end(const struct xdp_md *ctx)
{
	return (const void *)(long)((const volatile struct xdp_md *)ctx)->data_end;
}

/*
 * Walks the options of the TCP header at an offset in the frame. Returns the offset of the
 * timestamps in the frame; 0: there are none. Options behind a malformed one do not count. Not
 * inlined: the verifier walks it once, and almost no packet needs it. The position is hidden from
 * the verifier (forget), which would otherwise walk each sequence of positions. The masks give it
 * bounds.
 */
__noinline int walk_to_timestamps(struct xdp_md *ctx, __u32 tcp)
{
	const __u8 *header = bytes_at(ctx, tcp);
	__u32 at = sizeof(struct tcphdr), end;

	if ((const void *)header + sizeof(struct tcphdr) > bytes_end(ctx))
		return 0;
	end = (header[12] >> 4) * 4;
	for (int i = 0; i < MAX_TCP_OPTIONS_SIZE; i++) {
		const __u8 *option;

		at = forget(at) & 0x3f;
		option = bytes_at(ctx, tcp) + at;
		if (at >= end || (const void *)option + 1 > bytes_end(ctx) ||
		    option[0] == TCP_OPTION_END)
			return 0;
		if (option[0] == TCP_OPTION_NOP) {
			at++;
			continue;
		}
		if ((const void *)option + 2 > bytes_end(ctx) || option[1] < 2 ||
		    at + option[1] > end)
			return 0;
		if (option[0] == TCP_OPTION_TIMESTAMPS)
			return option[1] == TCP_OPTION_TIMESTAMPS_SIZE ? (tcp & 0x7fff) + at + 2
								       : 0;
		at += option[1];
	}
	return 0;
}

/*
 * Finds the timestamps of the TCP header at an offset in the frame (transport_offset). First it
 * looks where nearly all packets other than SYNs have them: at the beginning of the options, behind
 * two NOPs. The header must be whole, as parse_transport() checks. NULL: there are none.
 */
static __always_inline struct timestamps *find_timestamps(struct xdp_md *ctx, __u32 tcp)
{
	const __u8 *header = bytes_at(ctx, tcp);
	const __be32 *first = (const void *)header + sizeof(struct tcphdr);
	struct timestamps *found = (void *)(first + 1);
	__u32 offset;

	if ((const void *)(found + 1) <= bytes_end(ctx) && *first == bpf_htonl(TIMESTAMPS_FIRST) &&
	    header[12] >> 4 >= (sizeof(struct tcphdr) + sizeof(*first) + sizeof(*found)) / 4)
		return found;
	offset = walk_to_timestamps(ctx, tcp);
	found = bytes_at(ctx, offset);
	return offset && (const void *)(found + 1) <= bytes_end(ctx) ? found : NULL;
}

#endif
