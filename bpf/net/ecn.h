/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Explicit congestion notification on decapsulation: the inner header takes over marks of the
 * outer one (RFC 6040 section 4.2, figure 4).
 */
#ifndef SEGUE_NET_ECN_H
#define SEGUE_NET_ECN_H

#include <linux/ip.h>
#include <linux/ipv6.h>

#include "types.h"

#define ECN_MASK 3

enum ecn {
	ECN_NOT_ECT = 0,
	ECN_ECT_1 = 1,
	ECN_ECT_0 = 2,
	ECN_CE = 3,
};

/* Returns the inner header's new ECN field. -1: the packet must be dropped, because it carries a
 * mark and its sender does not understand marks. */
static __always_inline int combine_ecn(__u8 inner, __u8 outer)
{
	inner &= ECN_MASK;
	outer &= ECN_MASK;
	if (inner == ECN_NOT_ECT)
		return outer == ECN_CE ? -1 : ECN_NOT_ECT;
	if (outer == ECN_CE || (outer == ECN_ECT_1 && inner == ECN_ECT_0))
		return outer;
	return inner;
}

/* Sets the ECN field, and updates the checksum by RFC 1624 equation 3. The field is in the header's
 * first 16-bit word. */
static __always_inline void set_ipv4_ecn(struct iphdr *ip, __u8 ecn)
{
	__be16 *word = (__be16 *)ip;
	__u32 sum = (__u16)~ip->check + (__u16) ~*word;

	ip->tos = (ip->tos & ~ECN_MASK) | ecn;
	sum += *word;
	sum = (sum & 0xffff) + (sum >> 16);
	ip->check = ~((sum & 0xffff) + (sum >> 16));
}

static __always_inline void set_ipv6_ecn(struct ipv6hdr *ip, __u8 ecn)
{
	ip->flow_lbl[0] = (ip->flow_lbl[0] & ~(ECN_MASK << 4)) | ecn << 4;
}

#endif
