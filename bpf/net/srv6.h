/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Segment identifiers: locator (64 bits), function (16) and argument (48), the LOC:FUNCT:ARG of RFC
 * 8986 section 3.1; and the header that lists them (RFC 8754).
 */
#ifndef SEGUE_NET_SRV6_H
#define SEGUE_NET_SRV6_H

#include "types.h"

#define OUTER_HOP_LIMIT 64 /* of the headers around packets */
#define ROUTING_TYPE_SRH 4 /* RFC 8754 section 8.1 */
/* The most servers that a packet of an unknown flow visits: candidates of the present generation
 * and of former ones. Most drivers leave 256 bytes in front of a frame, of which the kernel keeps
 * 40 (struct xdp_frame). The headers for so many servers fit into the rest. A server drops packets
 * with more servers left to visit. Otherwise strangers could make servers pass a packet to and
 * fro. */
#define MAX_SEGMENTS 10

/* What a SID asks of the host that its locator names (docs/understand/protocol.md). */
enum sid_function {
	SID_HOST = 0x0000, /* no function: the host itself */

	/* At a server. */
	SID_CONNECT_AVAIL = 0x0001, /* accept this new connection, or pass it on */
	SID_CONNECT_FORCE = 0x0002, /* accept it */
	SID_ACK = 0x0003,	    /* deliver: the balancer knows that the server has the flow */
	SID_RECOVER = 0x0004,	    /* like SID_STEER, and tell the balancer */
	SID_DELIVER = 0x0005,	    /* deliver to the service */
	SID_STEER = 0x0006,	    /* deliver if the server has the flow */

	/* At servers and balancers. */
	SID_PROBE = 0x0007, /* at a server: answer; at a balancer: this is the answer */

	/* At a balancer. */
	SID_CREATE = 0x0011, /* create-stickiness: the sender has accepted the flow */
	SID_REMOVE = 0x0012, /* remove-stickiness: the flow is ending */
	SID_RETURN = 0x0013, /* the sender does not have the flow of the client's packet */
};

struct segment_routing_header {
	__u8 next_header;
	__u8 length; /* in units of 8 bytes, without the first 8 */
	__u8 type;
	__u8 segments_left;
	__u8 last_entry;
	__u8 flags;
	__be16 tag;
	struct in6_addr segment[]; /* the last one to be visited comes first */
};

/* A SID's low 64 bits, in memory order: the function, with an argument of 0. */
#define SID_LOW(function) ((__u64)bpf_htonl((__u32)(function) << 16))

/* Writes a SID of a locator, with these low 64 bits in memory order. */
static __always_inline void write_sid(struct in6_addr *out, const struct in6_addr *locator,
				      __u64 sid_low)
{
	((__u64 *)out)[0] = *(const __u64 *)locator;
	((__u64 *)out)[1] = sid_low;
}

/* The argument's place in a SID's low 64 bits, in memory order. */
#define SID_ARGUMENT_SHIFT 16
#define SID_ARGUMENT_MASK ((1ULL << 48) - 1)

/* The low 64 bits of a SID, in memory order: function and argument. */
static __always_inline __u64 low_bits_of(const struct in6_addr *sid)
{
	return ((const __u64 *)sid)[1];
}

static __always_inline __u64 sid_low_argument(__u64 sid_low)
{
	return sid_low >> SID_ARGUMENT_SHIFT;
}

static __always_inline enum sid_function sid_low_function(__u64 sid_low)
{
	return bpf_ntohs(sid_low);
}

static __always_inline enum sid_function sid_function(const struct in6_addr *sid)
{
	return sid_low_function(low_bits_of(sid));
}

#define SEGMENT_SIZE sizeof(struct in6_addr)

/* Bytes of a segment routing header with so many segments. */
static __always_inline __u32 srh_size(__u32 segments)
{
	return sizeof(struct segment_routing_header) + segments * SEGMENT_SIZE;
}

#endif
