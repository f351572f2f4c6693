/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * CRC-32 of Ethernet (IEEE 802.3 section 3.2.9): the only hash of 32 bits that v1model, PSA and PNA
 * all have, so that XDP and switches can find the same bucket of a flow.
 *
 * A CRC is linear and has no key. So anybody can choose flows that share a bucket.
 */
#ifndef SEGUE_NET_CRC_H
#define SEGUE_NET_CRC_H

#include "types.h"

/* Slicing by four (Kounavis and Berry, "Novel table lookup-based algorithms for high-performance
 * CRC generation", 2008): table i has the CRC of each byte with i zero bytes behind it. User space
 * sets the tables at load. */
const volatile __u32 crc_tables[4][256];

/* The CRC-32 of a flow's addresses and ports, in network order: 36 bytes. The protocol does not
 * count. Not inlined: many functions need it, and few services do. */
__noinline __u32 crc_of(const struct flow_key *flow)
{
	const __u32 *word = (const __u32 *)flow;
	__u32 crc = ~0U;

	if (!flow)
		return 0;
#pragma unroll
	for (int i = 0; i < offsetof(struct flow_key, protocol) / sizeof(*word); i++) {
		crc ^= word[i];
		crc = crc_tables[3][crc & 0xff] ^ crc_tables[2][crc >> 8 & 0xff] ^
		      crc_tables[1][crc >> 16 & 0xff] ^ crc_tables[0][crc >> 24];
	}
	return ~crc;
}

#endif
