/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * MSS clamping: lowers the maximum segment size that the server offers a client (RFC 9293 section
 * 3.7.1), so that the client's segments fit the path from balancer to server after encapsulation.
 */
#ifndef SEGUE_AGENT_MSS_H
#define SEGUE_AGENT_MSS_H

#include "maps.h"
#include "stats.h"
#include "sent.h"
#include "net/timestamp.h"

/* Headers with more options consist mostly of padding: options have at most 40 bytes. */
#define MAX_TCP_OPTIONS 20
#define TCP_OPTION_MSS 2
#define TCP_OPTION_MSS_SIZE 4

/* An MSS option: the offset of its value in the frame, and the value. */
struct mss_option {
	__u32 at;
	__be16 value;
};

/* The largest segment size of the service; 0: this node has no such service. */
static __always_inline __u32 largest_mss(struct service_key *key)
{
	__u32 *mss = bpf_map_lookup_elem(&segment_sizes, key);

	if (!mss) {
		key->port = 0;
		mss = bpf_map_lookup_elem(&segment_sizes, key);
	}
	return mss ? *mss : 0;
}

/* Finds the MSS option of the TCP header at `tcp`, and reads its value. SYN_ACK_FITS: it was found.
 * Each byte is read from the packet. With offsets into a copy on the stack, the verifier would
 * follow every combination of options. */
static __always_inline enum syn_ack find_mss(const struct __sk_buff *skb, __u32 tcp, __u32 size,
					     struct mss_option *mss)
{
	__u32 at = tcp + sizeof(struct tcphdr);
	__u32 end = tcp + size;

	for (int i = 0; i < MAX_TCP_OPTIONS; i++) {
		struct {
			__u8 kind, size;
		} option = {};

		if (at >= end)
			return SYN_ACK_NO_OPTION;
		if (bpf_skb_load_bytes(skb, at, &option.kind, sizeof(option.kind)))
			return SYN_ACK_MALFORMED;
		if (option.kind == TCP_OPTION_END)
			return SYN_ACK_NO_OPTION;
		if (option.kind == TCP_OPTION_NOP) {
			at++;
			continue;
		}
		if (bpf_skb_load_bytes(skb, at + 1, &option.size, sizeof(option.size)) ||
		    option.size < 2 || at + option.size > end)
			return SYN_ACK_MALFORMED;
		if (option.kind == TCP_OPTION_MSS) {
			mss->at = at + 2;
			if (option.size != TCP_OPTION_MSS_SIZE ||
			    bpf_skb_load_bytes(skb, mss->at, &mss->value, sizeof(mss->value)))
				return SYN_ACK_MALFORMED;
			return SYN_ACK_FITS;
		}
		at += option.size;
	}
	return SYN_ACK_MALFORMED;
}

/* A value as the checksum adds it: in 16-bit words, though an option may begin at an odd byte. */
static __always_inline __u16 checksum_word(__be16 value, __u32 offset)
{
	return offset & 1 ? value << 8 | value >> 8 : value;
}

/* Writes the value of an MSS option, and updates the checksum (RFC 1624). False: it failed. */
static __always_inline bool write_mss(struct __sk_buff *skb, __u32 tcp,
				      const struct mss_option *mss, __be16 value)
{
	__u32 offset = mss->at - tcp;

	return !bpf_l4_csum_replace(skb, tcp + offsetof(struct tcphdr, check),
				    checksum_word(mss->value, offset), checksum_word(value, offset),
				    sizeof(value)) &&
	       !bpf_skb_store_bytes(skb, mss->at, &value, sizeof(value), 0);
}

/* Lowers the MSS of the TCP header at `tcp` to `largest`, if it is higher. */
static __always_inline enum syn_ack clamp(struct __sk_buff *skb, __u32 tcp, __u32 size,
					  __u32 largest)
{
	struct mss_option mss = {};
	enum syn_ack result = find_mss(skb, tcp, size, &mss);

	if (result != SYN_ACK_FITS || bpf_ntohs(mss.value) <= largest)
		return result;
	return write_mss(skb, tcp, &mss, bpf_htons(largest)) ? SYN_ACK_CLAMPED : SYN_ACK_MALFORMED;
}

/* Lowers the MSS of a SYN-ACK of this node's services. Other packets are left alone. */
static __always_inline void clamp_mss(struct __sk_buff *skb, const struct sent *sent)
{
	struct service_key key = {
		.vip = sent->flow.destination,
		.port = sent->flow.destination_port,
		.protocol = IPPROTO_TCP,
	};
	__u32 largest;

	if (!(sent->tcp_flags & TCP_SYN) || !(sent->tcp_flags & TCP_ACK))
		return;
	largest = largest_mss(&key);
	if (!largest)
		return;
	count_syn_ack(clamp(skb, sent->transport, sent->tcp_size, largest));
}

#endif
