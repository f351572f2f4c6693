/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The argument of an offered SID: the candidate's column in its bucket's row, which the balancer
 * writes, and the candidate's load, which the candidate writes when it passes the connection on
 * (docs/understand/protocol.md, "Offers"). internal/srv6/offer.go has the same in Go.
 */
#ifndef SEGUE_NET_LOAD_H
#define SEGUE_NET_LOAD_H

#include "srv6.h"

/* Positions in the SID's low 64 bits (function << 48 | argument), in host order. */
#define LOAD_COLUMN_SHIFT 45
#define LOAD_NO_COLUMN (1ULL << 44)    /* the candidate is in no column of the row */
#define LOAD_WANTS_REPORT (1ULL << 43) /* the balancer takes load reports of this flow */
/* The width of the flow's cookie in bits (timestamp.h); 0: the flow has none. Also in the argument
 * of SID_STEER. */
#define LOAD_COOKIE_SHIFT 41
#define LOAD_COOKIE_MASK 3
/* In the argument of SID_STEER: a server that does not have the flow returns the packet. */
#define LOAD_RETURN (1ULL << 40)
#define LOAD_BITS 20
#define LOAD_MASK ((1ULL << 2 * LOAD_BITS) - 1)
#define MAX_LOAD ((1U << LOAD_BITS) - 1)

/* The load that a server would have with one connection more. */
struct known_load {
	__u32 next;	/* the present load + 1, at most MAX_LOAD; 0: the load is unknown */
	__u32 capacity; /* at most MAX_LOAD; 0: the load source has none */
};

/* Whether load a is less than load b, per unit of capacity. The comparison is exact. A server
 * without a capacity counts as one unit. Both loads must be known. */
static __always_inline bool is_less_busy(struct known_load a, struct known_load b)
{
	return (__u64)a.next * (b.capacity ?: 1) < (__u64)b.next * (a.capacity ?: 1);
}

/* The load in the argument of a SID. `sid_low`: the SID's low 64 bits, in memory order. */
static __always_inline struct known_load load_of_sid(__u64 sid_low)
{
	__u64 argument = bpf_be64_to_cpu(sid_low);
	struct known_load load = {
		.next = argument >> LOAD_BITS & MAX_LOAD,
		.capacity = argument & MAX_LOAD,
	};

	return load;
}

/* The width of a flow's cookie in the argument of a SID. `sid_low` is as in load_of_sid. */
static __always_inline __u32 cookie_width_of_sid(__u64 sid_low)
{
	return bpf_be64_to_cpu(sid_low) >> LOAD_COOKIE_SHIFT & LOAD_COOKIE_MASK;
}

/* The low 64 bits of a SID, in memory order, with another load in the argument. */
static __always_inline __u64 sid_low_with_load(__u64 sid_low, struct known_load load)
{
	__u64 argument = (__u64)load.next << LOAD_BITS | load.capacity;

	return bpf_cpu_to_be64((bpf_be64_to_cpu(sid_low) & ~LOAD_MASK) | argument);
}

/* The low 64 bits of a SID, in memory order, with another function. */
static __always_inline __u64 sid_low_with_function(__u64 sid_low, enum sid_function function)
{
	return (sid_low & ~SID_LOW(0xffff)) | SID_LOW(function);
}

#endif
