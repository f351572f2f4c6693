/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A TCP packet that this host sends.
 */
#ifndef SEGUE_AGENT_SENT_H
#define SEGUE_AGENT_SENT_H

#include "net/parse.h"

struct sent {
	struct flow_key flow;	    /* the client's packets': the client is the source */
	__be32 version_class_label; /* first 32 bits of an IPv6 header */
	__u16 tcp;		    /* offset of the TCP header in the frame */
	__u8 tcp_size;
	__u8 tcp_flags;	  /* enum tcp_flag */
	bool is_fragment; /* the first fragment of an IPv4 packet */
};

static __always_inline bool read_sent_ipv4(const struct __sk_buff *skb, struct sent *sent)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5 ||
	    ip.protocol != IPPROTO_TCP || ip.frag_off & bpf_htons(IP_OFFSET_MASK))
		return false;
	map_ipv4(&sent->flow.source, ip.daddr);
	map_ipv4(&sent->flow.destination, ip.saddr);
	sent->version_class_label = bpf_htonl(6 << 28 | ip.tos << 20);
	sent->is_fragment = ip.frag_off & bpf_htons(IP_FLAG_MF);
	sent->tcp = ETH_HLEN + ip.ihl * 4;
	return true;
}

static __always_inline bool read_sent_ipv6(const struct __sk_buff *skb, struct sent *sent)
{
	struct ipv6hdr ip;

	/* In the tables, the IPv4-mapped form means IPv4: no IPv6 packet may have it. */
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 6 ||
	    ip.nexthdr != IPPROTO_TCP || is_ipv4(&ip.saddr))
		return false;
	sent->flow.source = ip.daddr;
	sent->flow.destination = ip.saddr;
	sent->version_class_label = *(const __be32 *)&ip;
	sent->tcp = ETH_HLEN + sizeof(ip);
	return true;
}

/* Reads up to the TCP header. False when the packet is not TCP, or has extension headers. `sent`
 * must be zero. */
static __always_inline bool read_sent(const struct __sk_buff *skb, struct sent *sent)
{
	struct tcphdr tcp;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!read_sent_ipv4(skb, sent))
			return false;
	} else if (skb->protocol != bpf_htons(ETH_P_IPV6) || !read_sent_ipv6(skb, sent)) {
		return false;
	}
	if (bpf_skb_load_bytes(skb, sent->tcp, &tcp, sizeof(tcp)))
		return false;
	sent->flow.source_port = tcp.dest;
	sent->flow.destination_port = tcp.source;
	sent->flow.protocol = IPPROTO_TCP;
	sent->tcp_size = tcp.doff * 4;
	sent->tcp_flags = ((__u8 *)&tcp)[13];
	return true;
}

#endif
