/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Answers: ICMP errors about packets that the balancer cannot forward, resets of connections that
 * no server gets (reject.h), and replies to pings. The frame becomes the answer and goes back to
 * the router that sent it, whatever the route to the client is.
 *
 * The source of an answer is the VIP: the client knows that address, it has the client's family,
 * and every network on the way accepts it as a source.
 */
#ifndef SEGUE_BALANCER_PATH_ANSWER_H
#define SEGUE_BALANCER_PATH_ANSWER_H

#include "balancer/decision.h"
#include "balancer/path/encap.h"
#include "net/parse.h"
#include "balancer/stats.h"
#include "net/token.h"

/* Bytes of the longest ICMP error: RFC 1812 section 4.3.2.3, RFC 4443 section 2.4(c). */
#define MAX_ICMPV4_ERROR 576
#define MAX_ICMPV6_ERROR 1280
/* Limits how many bytes sum_frame() adds, for the verifier. An ICMPv6 error needs the most: all of
 * its 1280 bytes but the first eight. */
#define MAX_SUMMED 0x7ff
/* The smallest MTUs that clients are told: RFC 791 section 3.2, RFC 8200 section 5. */
#define MIN_IPV4_MTU 68
#define MIN_IPV6_MTU 1280
/* Class selector 6, as RFC 1812 section 4.3.2.5 requires. */
#define ICMP_ERROR_CLASS 0xc0
#define OWN_HOP_LIMIT 64

enum icmpv4_type {
	ICMPV4_ECHO_REPLY = 0,
	ICMPV4_UNREACHABLE = 3,
	ICMPV4_ECHO = 8,
	ICMPV4_TIME_EXCEEDED = 11,
	ICMPV4_PARAMETER_PROBLEM = 12,
};

/* Codes of ICMPV4_UNREACHABLE and ICMPV6_UNREACHABLE. */
#define ICMPV4_PORT_UNREACHABLE 3
#define ICMPV4_FRAGMENTATION_NEEDED 4
#define ICMPV6_PORT_UNREACHABLE 4

enum icmpv6_type {
	ICMPV6_UNREACHABLE = 1,
	ICMPV6_TOO_BIG = 2,
	ICMPV6_TIME_EXCEEDED = 3,
	ICMPV6_PARAMETER_PROBLEM = 4,
	ICMPV6_ECHO = 128,
	ICMPV6_ECHO_REPLY = 129,
	ICMPV6_NEIGHBOUR_SOLICITATION = 135,
};

struct icmp_header {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__be32 rest; /* the MTU, if the error is about a packet that is too big */
};

enum answer_form {
	ANSWER_ICMPV4,
	ANSWER_ICMPV6,
	ANSWER_RESET,
	ANSWER_FORMS,
};

#define ANSWER_BUDGETS (ANSWERS * ANSWER_FORMS)

/* A token bucket for each reason and form (token.h). So a flood of packets that cause one kind of
 * answer does not use up the answers of another kind, on which other clients rely. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, ANSWER_BUDGETS);
	__type(key, __u32);
	__type(value, __u64);
} answers SEC(".maps");

static __always_inline enum answer_form icmp_form(bool is_v4)
{
	return is_v4 ? ANSWER_ICMPV4 : ANSWER_ICMPV6;
}

/* Takes a token for an answer of this reason and form. False: the rate limit is exceeded. */
static __always_inline bool may_answer_now(enum lb_reason why, enum answer_form form)
{
	__u32 key = (why - FIRST_ANSWER) * ANSWER_FORMS + form;

	return take_token(bpf_map_lookup_elem(&answers, &key));
}

/* Whether the source may be the address of one host: it is not unspecified, loopback, multicast or
 * reserved. */
static __always_inline bool is_from_one_host(const struct packet *pkt)
{
	const struct in6_addr *source = &pkt->key.source;
	__u8 first = source->s6_addr[12]; /* byte of an IPv4 address */

	if (pkt->ethertype == bpf_htons(ETH_P_IP))
		return first != 0 && first != 127 && first < 224;
	return (source->s6_addr32[0] || source->s6_addr32[1]) && source->s6_addr[0] != 0xff;
}

/* Updates a checksum for one changed word, by RFC 1624 equation 3. */
static __always_inline __u16 replace_word(__u16 checksum, __u16 from, __u16 to)
{
	__u32 sum = (__u16)~checksum + (__u16)~from + to;

	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

/* Exchanges source and destination of an Ethernet header. */
static __always_inline void turn_ethernet(struct ethhdr *ethernet)
{
	struct ethhdr old = *ethernet;

	__builtin_memcpy(ethernet->h_dest, old.h_source, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, old.h_dest, ETH_ALEN);
}

static __always_inline bool is_echo_request(const struct packet *pkt,
					    const struct icmp_header *icmp)
{
	return icmp->type == (pkt->ethertype == bpf_htons(ETH_P_IP) ? ICMPV4_ECHO : ICMPV6_ECHO);
}

/* Turns an echo request into its reply: changes the type, and updates the checksum. All other
 * fields stay. */
static __always_inline void turn_echo(struct icmp_header *icmp, __u8 reply)
{
	__u16 *type_and_code = (__u16 *)icmp;
	__u16 old = *type_and_code;

	icmp->type = reply;
	icmp->checksum = replace_word(icmp->checksum, old, *type_and_code);
}

/* Turns a ping over IPv4 into its reply. False: the frame is too short. */
static __always_inline bool turn_ipv4(struct iphdr *ip, const void *end)
{
	struct icmp_header *icmp = (void *)(ip + 1);
	__u16 *ttl_and_protocol = (__u16 *)&ip->ttl;
	__be32 vip = ip->daddr;
	__u16 old;

	if ((void *)(icmp + 1) > end)
		return false;
	old = *ttl_and_protocol;
	ip->ttl = OWN_HOP_LIMIT;
	ip->check = replace_word(ip->check, old, *ttl_and_protocol);
	ip->daddr = ip->saddr;
	ip->saddr = vip;
	turn_echo(icmp, ICMPV4_ECHO_REPLY);
	return true;
}

/* Turns a ping over IPv6 into its reply. False: the frame is too short. */
static __always_inline bool turn_ipv6(struct ipv6hdr *ip, const void *end)
{
	struct icmp_header *icmp = (void *)(ip + 1);
	struct in6_addr vip;

	if ((void *)(icmp + 1) > end)
		return false;
	vip = ip->daddr;
	ip->hop_limit = OWN_HOP_LIMIT;
	ip->daddr = ip->saddr;
	ip->saddr = vip;
	turn_echo(icmp, ICMPV6_ECHO_REPLY);
	return true;
}

/* Turns a ping into its reply, in place. A ping with IPv4 options or extension headers is not
 * answered, because those would have to be reversed too, and nobody sends such pings. */
static __always_inline enum lb_reason answer_echo(struct xdp_md *ctx, const struct packet *pkt)
{
	bool is_v4 = pkt->ethertype == bpf_htons(ETH_P_IP);
	__u32 header = is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	struct ethhdr *ethernet = frame_start(ctx);
	const void *end = frame_end(ctx);
	void *ip = ethernet + 1;

	if (transport_offset(pkt) != ETH_HLEN + header || !is_from_one_host(pkt) || ip > end)
		return LB_DROP_ICMP_TYPE;
	if (!may_answer_now(LB_ANSWER_ECHO, icmp_form(is_v4)))
		return LB_DROP_RATE_LIMIT;
	if (!(is_v4 ? turn_ipv4(ip, end) : turn_ipv6(ip, end)))
		return LB_DROP_TRANSPORT;
	turn_ethernet(ethernet);
	return LB_ANSWER_ECHO;
}

/* The ones' complement sum of `size` bytes at an offset in the frame; 0: the frame is too short.
 * Not inlined: the verifier walks the loop once. */
__noinline __u32 sum_frame(struct xdp_md *ctx, __u32 offset, __u32 size)
{
	void *start = frame_start(ctx) + (offset & 0xff);
	void *rest = start + (size & MAX_SUMMED & ~3);
	__u64 sum = 0;

	for (__u32 i = 0; i < MAX_SUMMED; i += sizeof(__u32)) {
		__u32 *word = start + i;

		if (i + sizeof(*word) > size)
			break;
		if ((void *)(word + 1) > frame_end(ctx))
			return 0;
		sum += *word;
	}
	if (size & 2) {
		if (rest + sizeof(__u16) > frame_end(ctx))
			return 0;
		sum += *(__u16 *)rest;
		rest += sizeof(__u16);
	}
	if (size & 1) {
		if (rest + 1 > frame_end(ctx))
			return 0;
		sum += bpf_htons(*(__u8 *)rest << 8);
	}
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Writes the header of an error about a packet, without its checksum. */
static __always_inline void write_icmp_error(struct icmp_header *icmp, bool is_v4,
					     enum lb_reason why, __u32 mtu)
{
	struct icmp_header header = {};

	if (why == LB_ANSWER_TOO_BIG) {
		header.type = is_v4 ? ICMPV4_UNREACHABLE : ICMPV6_TOO_BIG;
		header.code = is_v4 ? ICMPV4_FRAGMENTATION_NEEDED : 0;
		header.rest = bpf_htonl(mtu);
	} else if (why == LB_ANSWER_HOP_LIMIT) {
		header.type = is_v4 ? ICMPV4_TIME_EXCEEDED : ICMPV6_TIME_EXCEEDED;
	} else {
		header.type = is_v4 ? ICMPV4_UNREACHABLE : ICMPV6_UNREACHABLE;
		header.code = is_v4 ? ICMPV4_PORT_UNREACHABLE : ICMPV6_PORT_UNREACHABLE;
	}
	*icmp = header;
}

/* Writes the checksum of an ICMP message at an offset in the frame. `sum` is the sum of all that
 * the checksum covers. False: the frame is too short. */
static __always_inline bool write_checksum(struct xdp_md *ctx, __u32 offset, __u32 sum)
{
	struct icmp_header *icmp = frame_start(ctx) + offset;

	if ((void *)(icmp + 1) > frame_end(ctx))
		return false;
	sum = (sum & 0xffff) + (sum >> 16);
	icmp->checksum = ~((sum & 0xffff) + (sum >> 16));
	return true;
}

/* Writes an ICMP error in front of the first `quote` bytes of the packet that it is about. False:
 * the frame is too short. */
static __always_inline bool write_ipv4_error(struct xdp_md *ctx, __u32 quote, enum lb_reason why,
					     __u32 mtu)
{
	struct iphdr *ip = frame_start(ctx) + ETH_HLEN;
	struct icmp_header *icmp = (void *)(ip + 1);
	struct iphdr *quoted = (void *)(icmp + 1);
	struct iphdr header = {
		.version = 4,
		.ihl = 5,
		.tos = ICMP_ERROR_CLASS,
		.tot_len = bpf_htons(sizeof(*ip) + sizeof(*icmp) + quote),
		.frag_off = bpf_htons(IP_FLAG_DF),
		.ttl = OWN_HOP_LIMIT,
		.protocol = IPPROTO_ICMP,
	};

	if ((void *)(quoted + 1) > frame_end(ctx))
		return false;
	header.saddr = quoted->daddr;
	header.daddr = quoted->saddr;
	header.check = ipv4_checksum(&header);
	*ip = header;
	write_icmp_error(icmp, true, why, mtu);
	return write_checksum(ctx, ETH_HLEN + sizeof(*ip),
			      sum_frame(ctx, ETH_HLEN + sizeof(*ip), sizeof(*icmp) + quote));
}

/* Writes an ICMPv6 error in front of the first `quote` bytes of the packet that it is about. The
 * checksum covers the addresses, too, which are right in front of the message. False: the frame is
 * too short. */
static __always_inline bool write_ipv6_error(struct xdp_md *ctx, __u32 quote, enum lb_reason why,
					     __u32 mtu)
{
	struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;
	struct icmp_header *icmp = (void *)(ip + 1);
	struct ipv6hdr *quoted = (void *)(icmp + 1);
	__be16 length = bpf_htons(sizeof(*icmp) + quote);
	__u32 sum;

	if ((void *)(quoted + 1) > frame_end(ctx))
		return false;
	*(__be32 *)ip = bpf_htonl(6 << 28 | ICMP_ERROR_CLASS << 20);
	ip->payload_len = length;
	ip->nexthdr = IPPROTO_ICMPV6;
	ip->hop_limit = OWN_HOP_LIMIT;
	ip->saddr = quoted->daddr;
	ip->daddr = quoted->saddr;
	write_icmp_error(icmp, false, why, mtu);
	sum = sum_frame(ctx, ETH_HLEN + offsetof(struct ipv6hdr, saddr),
			sizeof(*ip) - offsetof(struct ipv6hdr, saddr) + sizeof(*icmp) + quote);
	return write_checksum(ctx, ETH_HLEN + sizeof(*ip),
			      sum + length + bpf_htons(IPPROTO_ICMPV6));
}

/* Makes room for `headers` bytes in front of the packet, cuts the packet to `quote` bytes, and
 * turns the Ethernet header (turn_ethernet). False: it failed. */
static __always_inline bool make_room(struct xdp_md *ctx, __u32 headers, __u32 quote)
{
	struct ethhdr *ethernet = frame_start(ctx), saved;
	int size = bpf_xdp_get_buff_len(ctx);

	if ((void *)(ethernet + 1) > frame_end(ctx))
		return false;
	saved = *ethernet;
	turn_ethernet(&saved);
	if (bpf_xdp_adjust_tail(ctx, ETH_HLEN + (int)quote - size) ||
	    bpf_xdp_adjust_head(ctx, -(int)headers))
		return false;
	ethernet = frame_start(ctx);
	if ((void *)(ethernet + 1) > frame_end(ctx))
		return false;
	*ethernet = saved;
	return true;
}

/*
 * Turns the frame into an ICMP error about its packet, which had `length` bytes when it was
 * received. Returns `why`, or the reason for a drop. Not inlined: see sum_frame, and forwarded
 * packets do not take this path.
 */
__noinline int answer_error(struct xdp_md *ctx, __u32 length, __u32 why, __u32 mtu)
{
	const struct ethhdr *ethernet = frame_start(ctx);
	__u32 headers, most;
	bool is_v4;

	if ((void *)(ethernet + 1) > frame_end(ctx))
		return LB_DROP_NO_HEADROOM;
	is_v4 = ethernet->h_proto == bpf_htons(ETH_P_IP);
	headers = sizeof(struct icmp_header) +
		  (is_v4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr));
	most = (is_v4 ? MAX_ICMPV4_ERROR : MAX_ICMPV6_ERROR) - headers;
	length = length < most ? length : most;
	if (!may_answer_now(why, icmp_form(is_v4)))
		return LB_DROP_RATE_LIMIT;
	if (!make_room(ctx, headers, length))
		return LB_DROP_NO_HEADROOM;
	if (!(is_v4 ? write_ipv4_error(ctx, length, why, mtu)
		    : write_ipv6_error(ctx, length, why, mtu)))
		return LB_DROP_NO_HEADROOM;
	return why;
}

/* Whether an answer to the packet is permitted. ICMP errors are not answered, and answers go only
 * to the address of one host (RFC 1122 section 3.2.2, RFC 4443 section 2.4(e)). */
static __always_inline bool may_answer(const struct packet *pkt)
{
	return pkt->kind == PACKET_WHOLE && is_from_one_host(pkt);
}

/* Answers a packet whose hop limit is exceeded, or drops it. Returns the reason. */
static __always_inline enum lb_reason refuse_hop_limit(struct xdp_md *ctx, const struct packet *pkt)
{
	if (!may_answer(pkt))
		return LB_DROP_HOP_LIMIT;
	return answer_error(ctx, pkt->length, LB_ANSWER_HOP_LIMIT, 0);
}

/*
 * Answers a packet that is too long for the path to its server, or drops it. Returns the reason.
 * The client is told `mtu`, the number of bytes that the path has room for. IPv4 packets that may
 * be fragmented are answered too, because the balancer does not fragment. There is no answer when
 * the client could not send packets that are small enough.
 */
static __always_inline enum lb_reason refuse_length(struct xdp_md *ctx, const struct packet *pkt,
						    int mtu)
{
	int least = pkt->ethertype == bpf_htons(ETH_P_IP) ? MIN_IPV4_MTU : MIN_IPV6_MTU;

	if (mtu < least)
		mtu = least;
	if (!may_answer(pkt) || pkt->length <= mtu)
		return LB_DROP_TOO_BIG;
	return answer_error(ctx, pkt->length, LB_ANSWER_TOO_BIG, mtu);
}

#endif
