/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A packet that this host sends: of TCP or, if connection IDs of QUIC are compared, of UDP.
 */
#ifndef SEGUE_AGENT_SENT_H
#define SEGUE_AGENT_SENT_H

#include "net/parse.h"

struct sent {
	struct flow_key flow;	    /* key of the client's packets: the client is the source */
	__be32 version_class_label; /* the start of an IPv6 header with the packet's class */
	__u16 transport;	    /* offset of the transport header in the frame */
	__u8 tcp_size;
	__u8 tcp_flags;	  /* enum tcp_flag; 0 for UDP */
	bool is_fragment; /* the first fragment of an IPv4 packet */
};

/* Whether the connection IDs of any service are compared (quic.h). */
volatile __u32 quic_is_compared;

/* Whether the agent reads sent packets of a protocol. */
static __always_inline bool is_read(__u8 protocol)
{
	return protocol == IPPROTO_TCP || (protocol == IPPROTO_UDP && quic_is_compared);
}

/* Reads the IPv4 header of a sent packet. False: it is malformed, or the packet is of another
 * protocol or a later fragment. */
static __always_inline bool read_sent_ipv4(const struct __sk_buff *skb, struct sent *sent)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5 ||
	    !is_read(ip.protocol) || ip.frag_off & bpf_htons(IP_OFFSET_MASK))
		return false;
	map_ipv4(&sent->flow.source, ip.daddr);
	map_ipv4(&sent->flow.destination, ip.saddr);
	sent->version_class_label = bpf_htonl(6 << 28 | ip.tos << 20);
	sent->is_fragment = ip.frag_off & bpf_htons(IP_FLAG_MF);
	sent->flow.protocol = ip.protocol;
	sent->transport = ETH_HLEN + ip.ihl * 4;
	return true;
}

/* Reads the IPv6 header of a sent packet. False: it is malformed, or another protocol or an
 * extension header follows. */
static __always_inline bool read_sent_ipv6(const struct __sk_buff *skb, struct sent *sent)
{
	struct ipv6hdr ip;

	/* In the tables, the IPv4-mapped form means IPv4: no IPv6 packet may have it. */
	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 6 ||
	    !is_read(ip.nexthdr) || is_ipv4(&ip.saddr))
		return false;
	sent->flow.source = ip.daddr;
	sent->flow.destination = ip.saddr;
	sent->version_class_label = *(const __be32 *)&ip;
	sent->flow.protocol = ip.nexthdr;
	sent->transport = ETH_HLEN + sizeof(ip);
	return true;
}

/* Reads the TCP header of a sent packet. False: the packet is too short. */
static __always_inline bool read_sent_tcp(const struct __sk_buff *skb, struct sent *sent)
{
	struct tcphdr tcp;

	if (bpf_skb_load_bytes(skb, sent->transport, &tcp, sizeof(tcp)))
		return false;
	sent->flow.source_port = tcp.dest;
	sent->flow.destination_port = tcp.source;
	sent->tcp_size = tcp.doff * 4;
	sent->tcp_flags = ((__u8 *)&tcp)[13];
	return true;
}

/* Reads the UDP header of a sent packet. False: the packet is too short. */
static __always_inline bool read_sent_udp(const struct __sk_buff *skb, struct sent *sent)
{
	struct udphdr udp;

	if (bpf_skb_load_bytes(skb, sent->transport, &udp, sizeof(udp)))
		return false;
	sent->flow.source_port = udp.dest;
	sent->flow.destination_port = udp.source;
	return true;
}

/* Reads a sent packet: its IP header, and its TCP or UDP header. False when it has another protocol
 * or extension headers, is a later fragment, or is malformed. `sent` must be zero. */
static __always_inline bool read_sent(const struct __sk_buff *skb, struct sent *sent)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (!read_sent_ipv4(skb, sent))
			return false;
	} else if (skb->protocol != bpf_htons(ETH_P_IPV6) || !read_sent_ipv6(skb, sent)) {
		return false;
	}
	if (sent->flow.protocol == IPPROTO_UDP)
		return read_sent_udp(skb, sent);
	return read_sent_tcp(skb, sent);
}

#endif
