/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Writes the cookie into the timestamp of a packet that this host sends. All timestamps of a flow
 * have the same low bits, so they never decrease, as RFC 7323 requires.
 */
#ifndef SEGUE_AGENT_STAMP_H
#define SEGUE_AGENT_STAMP_H

#include "cookie.h"

/* The low bits of the timestamp in a SYN-ACK with a SYN cookie (RFC 4987): Linux keeps the client's
 * window scale, SACK and ECN there (net/ipv4/syncookies.c). */
#define SYN_COOKIE_BITS 6

/*
 * The timestamp of a SYN-ACK that has a SYN cookie, and so no socket. The column displaces some of
 * the lowest six bits. The stack needs these again, and the client will return no other state. So
 * they move to the place above the six bits. The part above the moved bits becomes less by one if
 * the timestamp would be later than the clock. The timestamp is at most 2^(6 + width) ms earlier
 * than the clock. restored_syn_cookie() undoes the move.
 */
static __always_inline __u32 stamped_syn_cookie(__u32 value, __u32 mask, __u32 column)
{
	__u32 unit = (mask + 1) << SYN_COOKIE_BITS; /* the lowest bit above the moved ones */
	__u32 kept = value & ((1 << SYN_COOKIE_BITS) - 1) & ~mask;
	__u32 stamped = (value & ~(unit - 1)) | (value & mask) << SYN_COOKIE_BITS | kept | column;

	return (__s32)(stamped - value) > 0 ? stamped - unit : stamped;
}

/* The echo of the timestamp of a SYN-ACK with a SYN cookie. The low bits of the echo are restored
 * to what the stack sent. The other bits only measure the round trip. */
static __always_inline __u32 restored_syn_cookie(__u32 echo, __u32 mask)
{
	return (echo & ~mask) | (echo >> SYN_COOKIE_BITS & mask);
}

/* A 32-bit value as the checksum adds it, in words of 16 bits. At an odd offset, the bytes of each
 * word are swapped. */
static __always_inline __u32 checksum_words(__be32 value, __u32 offset)
{
	return offset & 1 ? (value & 0x00ff00ff) << 8 | (value >> 8 & 0x00ff00ff) : value;
}

/*
 * Walks the options of a sent packet, from `at` to `end`. Returns the offset in the frame of the
 * timestamps; 0: there are none. Like walk_to_timestamps(), for socket buffers, whose bytes need
 * not be in one place.
 */
__noinline int walk_to_sent_timestamps(struct __sk_buff *skb, __u32 at, __u32 end)
{
	for (int i = 0; i < MAX_TCP_OPTIONS_SIZE; i++) {
		struct {
			__u8 kind, size;
		} option = {};

		if (at >= end || bpf_skb_load_bytes(skb, at, &option.kind, sizeof(option.kind)) ||
		    option.kind == TCP_OPTION_END)
			return 0;
		if (option.kind == TCP_OPTION_NOP) {
			at++;
			continue;
		}
		if (bpf_skb_load_bytes(skb, at + 1, &option.size, sizeof(option.size)) ||
		    option.size < 2 || at + option.size > end)
			return 0;
		if (option.kind == TCP_OPTION_TIMESTAMPS)
			return option.size == TCP_OPTION_TIMESTAMPS_SIZE ? at + 2 : 0;
		at += option.size;
	}
	return 0;
}

/* The offset in the frame of the timestamps; 0: there are none. */
static __always_inline __u32 sent_timestamps(struct __sk_buff *skb, const struct sent *sent)
{
	__u32 options = sent->transport + sizeof(struct tcphdr),
	      end = sent->transport + sent->tcp_size;
	__be32 first;

	if (options + sizeof(first) + sizeof(struct timestamps) <= end &&
	    !bpf_skb_load_bytes(skb, options, &first, sizeof(first)) &&
	    first == bpf_htonl(TIMESTAMPS_FIRST))
		return options + sizeof(first);
	return walk_to_sent_timestamps(skb, options, end);
}

/* Writes a cookie into the timestamp of a packet. If the interface will segment the packet (TSO),
 * each segment gets a copy of the header, and so the cookie. */
static __always_inline void stamp(struct __sk_buff *skb, const struct sent *sent, __u8 cookie)
{
	__u32 mask = cookie_mask(cookie >> COOKIE_WIDTH_SHIFT), value, stamped;
	__u32 at = sent_timestamps(skb, sent), column = cookie & COOKIE_COLUMN_MASK & mask;
	bool is_syn_ack = (sent->tcp_flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK);
	__be32 before, after;

	if (!at || bpf_skb_load_bytes(skb, at, &before, sizeof(before)))
		return;
	value = bpf_ntohl(before);
	/* A SYN-ACK without a socket has a SYN cookie. */
	if (is_syn_ack && !skb->sk)
		stamped = stamped_syn_cookie(value, mask, column);
	else
		stamped = (value & ~mask) | column;
	after = bpf_htonl(stamped);
	/* The helper updates the checksum by RFC 1624. It leaves a checksum that the interface will
	 * complete: that one does not cover the options yet. */
	if (after == before ||
	    bpf_l4_csum_replace(skb, sent->transport + offsetof(struct tcphdr, check),
				checksum_words(before, at - sent->transport),
				checksum_words(after, at - sent->transport), sizeof(after)))
		return;
	bpf_skb_store_bytes(skb, at, &after, sizeof(after), 0);
}

/* Writes the flow's cookie into a sent packet, if the flow has one, and returns the cookie. `entry`
 * is the flow's entry in the flow table. Not inlined: the verifier walks it once. */
__noinline int stamp_cookie(struct __sk_buff *skb, const struct sent *sent,
			    const struct agent_flow *entry)
{
	__u8 cookie;

	if (!sent || !entry)
		return 0;
	cookie = cookie_of_sent(skb, entry);
	if (cookie)
		stamp(skb, sent, cookie);
	return cookie;
}

#endif
