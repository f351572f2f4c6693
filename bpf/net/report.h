/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A server's load report: the argument of the server's own segment in a signal
 * (docs/understand/protocol.md, "Load reports"). Argument 0 is no report.
 *
 *	serial		27 bits	the server's monotonic clock in ticks, modulo 2^27
 *	own load	8	a code; 0: unknown
 *	first		1	the sender was the first candidate of the flow
 *	no column	1	the first candidate has no column, or is not known
 *	column		3	of the first candidate
 *	first load	8	the code of the load that the first candidate told; 0: none
 */
#ifndef SEGUE_NET_REPORT_H
#define SEGUE_NET_REPORT_H

#include "load.h"

#define REPORT_TICK_SHIFT 22 /* a tick is 2^22 ns, 4.2 ms */
#define REPORT_SERIAL_BITS 27
#define REPORT_SERIAL_SHIFT 21
#define REPORT_SERIAL_MASK ((1U << REPORT_SERIAL_BITS) - 1)
#define REPORT_LOAD_SHIFT 13
/* The fields about the first candidate. */
#define REPORT_FIRST_MASK 0x1fff
#define REPORT_IS_FIRST (1 << 12)
#define REPORT_NO_COLUMN (1 << 11)
#define REPORT_COLUMN_SHIFT 8

/* The load code of one connection per unit of capacity. A server whose load has at most this code
 * has free capacity. */
#define LOAD_CODE_OF_ONE 16
#define MAX_LOAD_CODE 255
/* The load that code 255 stands for, in sixteenths: no code has a larger one. */
#define MAX_LOAD_VALUE (31 << 14)

/* This host's clock as a serial. */
static __always_inline __u32 serial_now(void)
{
	return bpf_ktime_get_ns() >> REPORT_TICK_SHIFT & REPORT_SERIAL_MASK;
}

/* How much later serial a is than b, in ticks; negative if it is earlier. */
static __always_inline __s32 serial_difference(__u32 a, __u32 b)
{
	return (__s32)((a - b) << (32 - REPORT_SERIAL_BITS)) >> (32 - REPORT_SERIAL_BITS);
}

/*
 * The code of a load: the connections per unit of capacity after one more connection, in
 * sixteenths, rounded up. 0: the load is unknown. Values up to 31 are exact. Larger ones keep five
 * significant bits: the value is halved until it is at most 31, and each halving adds 16.
 * accept.Code is the same in Go.
 */
static __always_inline __u8 load_code(struct known_load load)
{
	__u32 capacity = load.capacity ?: 1;
	__u32 value = (16 * load.next + capacity - 1) / capacity;
	__u32 exponent = 0;

	if (value < 16)
		return value;
	/* The second condition is for the verifier: no load needs 20 halvings. */
	while (value > 31 && exponent < 20) {
		value = (value + 1) / 2;
		exponent++;
	}
	value += 16 * exponent;
	return value < MAX_LOAD_CODE ? value : MAX_LOAD_CODE;
}

/* The load that a code stands for, in sixteenths; 0: unknown. A code c of at least 16 stands for
 * (16 + c % 16) << (c / 16 - 1). There is no branch, because the processor would often mispredict
 * it. */
static __always_inline __u32 load_value(__u8 code)
{
	__u32 is_large = (code + 240) >> 8; /* 1 if the code is at least 16 */

	return (code % 16 | is_large << 4) << code / 16 >> is_large;
}

static __always_inline __u32 report_serial(__u64 report)
{
	return report >> REPORT_SERIAL_SHIFT & REPORT_SERIAL_MASK;
}

static __always_inline __u8 report_load(__u64 report)
{
	return report >> REPORT_LOAD_SHIFT;
}

#endif
