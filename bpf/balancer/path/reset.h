/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Resets of TCP connections: to a client whose packet no server gets (reject.h), and in the name of
 * a client to a server (signals.h).
 */
#ifndef SEGUE_BALANCER_PATH_RESET_H
#define SEGUE_BALANCER_PATH_RESET_H

#include "balancer/path/answer.h"
#include "net/parse.h"

/* The fields of a reset. Its addresses and ports are those of a flow. */
struct reset {
	bool to_client; /* else it goes from the client to the VIP */
	bool has_ack;	/* the flag ACK */
	__be32 seq;
	__be32 ack_seq;
};

/* Writes the TCP header of a reset. One checksum code serves both families, because the prefixes of
 * two IPv4-mapped addresses add up to 0. */
static __always_inline void write_reset(struct tcphdr *tcp, const struct flow_key *flow,
					const struct reset *reset)
{
	struct {
		__be32 length, protocol;
		struct tcphdr tcp;
	} summed = {
		.length = bpf_htonl(sizeof(*tcp)),
		.protocol = bpf_htonl(IPPROTO_TCP),
		.tcp = {
			.source = reset->to_client ? flow->destination_port : flow->source_port,
			.dest = reset->to_client ? flow->source_port : flow->destination_port,
			.seq = reset->seq,
			.ack_seq = reset->ack_seq,
			.doff = sizeof(*tcp) / 4,
			.rst = 1,
			.ack = reset->has_ack,
		},
	};
	__s64 sum = bpf_csum_diff(NULL, 0, (void *)flow, offsetof(struct flow_key, source_port), 0);

	sum = bpf_csum_diff(NULL, 0, (void *)&summed, sizeof(summed), sum);
	sum = (sum & 0xffff) + (sum >> 16);
	summed.tcp.check = ~((sum & 0xffff) + (sum >> 16));
	*tcp = summed.tcp;
}

/* Writes a reset over IPv4 to the frame. False: the frame is too short. */
static __always_inline bool write_ipv4_reset(struct xdp_md *ctx, const struct flow_key *flow,
					     const struct reset *reset)
{
	struct iphdr *ip = frame_start(ctx) + ETH_HLEN;
	struct tcphdr *tcp = (void *)(ip + 1);
	__be32 client = flow->source.s6_addr32[3], vip = flow->destination.s6_addr32[3];
	struct iphdr header = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(*ip) + sizeof(*tcp)),
		.frag_off = bpf_htons(IP_FLAG_DF),
		.ttl = OWN_HOP_LIMIT,
		.protocol = IPPROTO_TCP,
		.saddr = reset->to_client ? vip : client,
		.daddr = reset->to_client ? client : vip,
	};

	if ((void *)(tcp + 1) > frame_end(ctx))
		return false;
	header.check = ipv4_checksum(&header);
	*ip = header;
	write_reset(tcp, flow, reset);
	return true;
}

/* Writes a reset over IPv6 to the frame. False: the frame is too short. */
static __always_inline bool write_ipv6_reset(struct xdp_md *ctx, const struct flow_key *flow,
					     const struct reset *reset)
{
	struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;
	struct tcphdr *tcp = (void *)(ip + 1);

	if ((void *)(tcp + 1) > frame_end(ctx))
		return false;
	*(__be32 *)ip = bpf_htonl(6 << 28);
	ip->payload_len = bpf_htons(sizeof(*tcp));
	ip->nexthdr = IPPROTO_TCP;
	ip->hop_limit = OWN_HOP_LIMIT;
	copy_address(&ip->saddr, reset->to_client ? &flow->destination : &flow->source);
	copy_address(&ip->daddr, reset->to_client ? &flow->source : &flow->destination);
	write_reset(tcp, flow, reset);
	return true;
}

/* Bytes of layer 3 of a reset. */
static __always_inline __u32 reset_length(bool is_v4)
{
	return (is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr)) + sizeof(struct tcphdr);
}

/* Replaces the packet in the frame by a reset of its flow. The Ethernet header stays. */
static __always_inline bool put_reset(struct xdp_md *ctx, const struct packet *pkt,
				      const struct reset *reset)
{
	bool is_v4 = pkt->ethertype == bpf_htons(ETH_P_IP);
	int size = bpf_xdp_get_buff_len(ctx);

	if (bpf_xdp_adjust_tail(ctx, ETH_HLEN + (int)reset_length(is_v4) - size))
		return false;
	return is_v4 ? write_ipv4_reset(ctx, &pkt->key, reset)
		     : write_ipv6_reset(ctx, &pkt->key, reset);
}

#endif
