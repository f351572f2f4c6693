/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The underlay: on a fabric without IPv6, SRv6 packets travel from host to host inside IPv4 and
 * UDP. The data of UDP is the IPv6 packet itself, with no header between (variant 1 of GUE,
 * draft-ietf-intarea-gue section 4). A locator is a prefix of 32 bits, which all hosts share, and
 * then its host's IPv4 address. So each SID tells the next outer destination, and no host needs a
 * table of the others.
 *
 * The source port is a hash of the flow (RFC 8085 section 5.1.1), so that routers and network cards
 * spread flows. The checksum is 0, as RFC 768 permits over IPv4: the inner headers have their own.
 */
#ifndef SEGUE_NET_UNDERLAY_H
#define SEGUE_NET_UNDERLAY_H

#include "net/ecn.h"
#include "net/hash.h"
#include "net/parse.h"
#include "net/srv6.h"

#define MAX_UNDERLAY_SOURCES 16
/* The lowest source port: RFC 6335 section 6. The ports above have the same two highest bits. */
#define UNDERLAY_LEAST_PORT 0xc000
#define UNDERLAY_DF 0x4000

/* A prefix of IPv4 addresses. */
struct underlay_prefix {
	__be32 address;
	__be32 mask;
};

/* The UDP port of the underlay; 0: this host has none. Set at load, as the other constants, so that
 * the verifier drops the code of the underlay from programs that need none. */
const volatile __be16 underlay_port;
/* The hosts whose packets are accepted. All other elements match no address. */
const volatile struct underlay_prefix underlay_sources[MAX_UNDERLAY_SOURCES];

/* The headers that the underlay adds. */
struct underlay_header {
	struct iphdr ip;
	struct udphdr udp;
};
#define UNDERLAY_SIZE sizeof(struct underlay_header)

/* What became of a packet of the underlay. */
enum underlay_result {
	UNDERLAY_REMOVED,  /* the frame has the packet that was inside */
	UNDERLAY_STRANGER, /* no source has its source address */
	UNDERLAY_WRONG,	   /* its headers are malformed, or it is not for this host */
	UNDERLAY_FAILED,   /* the kernel refused the change */
};

/* The IPv4 address in a locator, which is in memory order. */
static __always_inline __be32 underlay_address(__u64 locator)
{
	return locator >> 32;
}

/* The source port for a flow with this hash. */
static __always_inline __be16 underlay_source_port(__u32 hash)
{
	return bpf_htons(UNDERLAY_LEAST_PORT | mix(hash) >> 18);
}

/* Writes the headers in front of an IPv6 packet of `length` bytes. They go from this host, whose
 * locator is `from`, to the host of the SID `to`. The sum of the header's words is that of its
 * halves, after the folds. */
static __always_inline void write_underlay(struct underlay_header *out, __u64 from, __u64 to,
					   __u8 class, __u32 length, __be16 source_port)
{
	__be32 *word = (__be32 *)out;
	__be32 first = bpf_htonl(0x45000000 | class << 16 | (length + UNDERLAY_SIZE));
	__be32 third = bpf_htonl(OUTER_HOP_LIMIT << 24 | IPPROTO_UDP << 16);
	__u64 sum = (__u64)first + bpf_htonl(UNDERLAY_DF) + third + underlay_address(from) +
		    underlay_address(to);

	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	word[0] = first;
	word[1] = bpf_htonl(UNDERLAY_DF); /* the identification may be 0 then: RFC 6864 */
	word[2] = third | (__u32)(__u16)~sum << 16;
	word[3] = underlay_address(from);
	word[4] = underlay_address(to);
	word[5] = source_port | (__u32)underlay_port << 16;
	word[6] = bpf_htons(length + sizeof(struct udphdr));
}

/* Whether a host may send packets of the underlay. */
static __always_inline bool is_underlay_source(__be32 address)
{
#pragma unroll
	for (int i = 0; i < MAX_UNDERLAY_SOURCES; i++) {
		__be32 mask = underlay_sources[i].mask;

		if (underlay_sources[i].address && (address & mask) == underlay_sources[i].address)
			return true;
	}
	return false;
}

/* Whether the headers agree with each other, and the packet is for this locator. */
static __always_inline bool is_underlay_whole(const struct underlay_header *outer,
					      const struct ipv6hdr *ip, __u64 locator)
{
	__u32 length = sizeof(*ip) + bpf_ntohs(ip->payload_len);

	return *(const __u8 *)&outer->ip == 0x45 && ip->version == 6 && !outer->udp.check &&
	       bpf_ntohs(outer->udp.len) == length + sizeof(outer->udp) &&
	       bpf_ntohs(outer->ip.tot_len) == length + UNDERLAY_SIZE &&
	       !(outer->ip.frag_off & bpf_htons(IP_FLAG_MF | IP_OFFSET_MASK)) &&
	       *(const __u64 *)&ip->daddr == locator;
}

/* Removes the headers of the underlay from a frame that is to this host's port of it. The packet
 * inside takes over congestion marks (RFC 6040). */
static __always_inline enum underlay_result remove_underlay(struct xdp_md *ctx, __u64 locator)
{
	struct ethhdr *ethernet = frame_start(ctx), saved;
	const struct underlay_header *outer = (void *)(ethernet + 1);
	struct ipv6hdr *ip = (void *)(outer + 1);
	int ecn;

	if ((void *)(ip + 1) > frame_end(ctx))
		return UNDERLAY_WRONG;
	if (!is_underlay_source(outer->ip.saddr))
		return UNDERLAY_STRANGER;
	ecn = combine_ecn(ipv6_traffic_class(ip), outer->ip.tos);
	if (ecn < 0 || !is_underlay_whole(outer, ip, locator))
		return UNDERLAY_WRONG;
	set_ipv6_ecn(ip, ecn);
	saved = *ethernet;
	saved.h_proto = bpf_htons(ETH_P_IPV6);
	if (bpf_xdp_adjust_head(ctx, UNDERLAY_SIZE))
		return UNDERLAY_FAILED;
	ethernet = frame_start(ctx);
	if ((void *)(ethernet + 1) > frame_end(ctx))
		return UNDERLAY_FAILED;
	*ethernet = saved;
	return UNDERLAY_REMOVED;
}

#endif
