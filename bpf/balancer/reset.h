/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Resets. When two servers have accepted a connection, the second one gets a reset that seems to
 * come from the client. The server accepts the reset, because it has the sequence number that the
 * server expects (RFC 9293 section 3.10.7).
 */
#ifndef SEGUE_BALANCER_RESET_H
#define SEGUE_BALANCER_RESET_H

#include "answer.h"
#include "net/parse.h"
#include "unwrap.h"

/* Writes the TCP header of a reset. One checksum code serves both families, because the prefixes of
 * two IPv4-mapped addresses add up to 0. */
static __always_inline void write_reset(struct tcphdr *tcp, const struct packet *pkt,
					const struct signal *signal)
{
	struct {
		__be32 length, protocol;
		struct tcphdr tcp;
	} summed = {
		.length = bpf_htonl(sizeof(*tcp)),
		.protocol = bpf_htonl(IPPROTO_TCP),
		.tcp = {
			.source = pkt->key.source_port,
			.dest = pkt->key.destination_port,
			.seq = signal->acknowledged,
			.doff = sizeof(*tcp) / 4,
			.rst = 1,
		},
	};
	__s64 sum = bpf_csum_diff(NULL, 0, (void *)&pkt->key,
				  offsetof(struct flow_key, source_port), 0);

	sum = bpf_csum_diff(NULL, 0, (void *)&summed, sizeof(summed), sum);
	sum = (sum & 0xffff) + (sum >> 16);
	summed.tcp.check = ~((sum & 0xffff) + (sum >> 16));
	*tcp = summed.tcp;
}

static __always_inline bool write_ipv4_reset(struct xdp_md *ctx, const struct packet *pkt,
					     const struct signal *signal)
{
	struct iphdr *ip = frame_start(ctx) + ETH_HLEN;
	struct tcphdr *tcp = (void *)(ip + 1);
	struct iphdr header = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(*ip) + sizeof(*tcp)),
		.frag_off = bpf_htons(IP_FLAG_DF),
		.ttl = OWN_HOP_LIMIT,
		.protocol = IPPROTO_TCP,
		.saddr = pkt->key.source.s6_addr32[3],
		.daddr = pkt->key.destination.s6_addr32[3],
	};

	if ((void *)(tcp + 1) > frame_end(ctx))
		return false;
	header.check = ipv4_checksum(&header);
	*ip = header;
	write_reset(tcp, pkt, signal);
	return true;
}

static __always_inline bool write_ipv6_reset(struct xdp_md *ctx, const struct packet *pkt,
					     const struct signal *signal)
{
	struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;
	struct tcphdr *tcp = (void *)(ip + 1);

	if ((void *)(tcp + 1) > frame_end(ctx))
		return false;
	*(__be32 *)ip = bpf_htonl(6 << 28);
	ip->payload_len = bpf_htons(sizeof(*tcp));
	ip->nexthdr = IPPROTO_TCP;
	ip->hop_limit = OWN_HOP_LIMIT;
	copy_address(&ip->saddr, &pkt->key.source);
	copy_address(&ip->daddr, &pkt->key.destination);
	write_reset(tcp, pkt, signal);
	return true;
}

/* Turns the frame of a signal into the client's reset, without encapsulation. */
static __always_inline bool make_reset(struct xdp_md *ctx, struct packet *pkt,
				       const struct signal *signal)
{
	bool is_v4 = pkt->ethertype == bpf_htons(ETH_P_IP);
	__u32 length =
		(is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr)) + sizeof(struct tcphdr);
	int size = bpf_xdp_get_buff_len(ctx);

	if (bpf_xdp_adjust_tail(ctx, ETH_HLEN + (int)length - size))
		return false;
	pkt->length = length;
	pkt->hop_limit = OWN_HOP_LIMIT;
	pkt->version_class = is_v4 ? bpf_htons(0x4500) : bpf_htons(0x6000);
	pkt->tcp_flags = TCP_RST;
	return is_v4 ? write_ipv4_reset(ctx, pkt, signal) : write_ipv6_reset(ctx, pkt, signal);
}

#endif
