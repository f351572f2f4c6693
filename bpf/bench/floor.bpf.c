/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The least work of any balancer for `srv6-insert`: check that there is a packet, make room, write
 * the headers, and send the packet. xdp_floor looks nothing up. xdp_floor_lookup reads one word of
 * a table, which is the least work of any balancer with such a table.
 */
#include "net/hash.h"
#include "net/parse.h"
#include "net/srv6.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define SEGMENTS 3 /* VIP, server, balancer */

/* The addresses in all packets that are sent. User space sets them. */
__u64 to_mac, from_mac;
struct in6_addr server, balancer;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} table SEC(".maps");

const volatile __u32 table_shift; /* 64 less the bits of a word's number */

/* Encapsulates the packet. `found` is a word of the table: it becomes part of the server's
 * address. */
static __always_inline int encapsulate(struct xdp_md *ctx, __u32 found)
{
	const __u32 size = srh_size(SEGMENTS);
	struct segment_routing_header *srh;
	struct ethhdr *ethernet;
	struct ipv6hdr *ip, *old;

	if (frame_start(ctx) + ETH_HLEN + sizeof(*ip) > frame_end(ctx))
		return XDP_DROP;
	if (bpf_xdp_adjust_head(ctx, -(int)size))
		return XDP_DROP;
	ethernet = frame_start(ctx);
	ip = (void *)(ethernet + 1);
	srh = (void *)(ip + 1);
	old = (void *)ip + size;
	if ((void *)(old + 1) > frame_end(ctx))
		return XDP_DROP;
	__builtin_memcpy(ethernet->h_dest, &to_mac, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, &from_mac, ETH_ALEN);
	ethernet->h_proto = bpf_htons(ETH_P_IPV6);
	*ip = *old;
	srh->next_header = ip->nexthdr;
	srh->length = SEGMENTS * 2;
	srh->type = ROUTING_TYPE_SRH;
	srh->segments_left = SEGMENTS - 2;
	srh->last_entry = SEGMENTS - 1;
	srh->flags = 0;
	srh->tag = 0;
	srh->segment[0] = ip->daddr;
	srh->segment[1] = server;
	srh->segment[2] = balancer;
	ip->payload_len += bpf_htons(size); /* the sum has no carry, because the frames are small */
	ip->nexthdr = IPPROTO_ROUTING;
	ip->hop_limit--;
	ip->daddr = server;
	ip->daddr.s6_addr32[2] |= found;
	return XDP_TX;
}

SEC("xdp")
int xdp_floor(struct xdp_md *ctx)
{
	return encapsulate(ctx, 0);
}

/* Reads the word of the table that a hash of the client's address names, and encapsulates the
 * packet. */
SEC("xdp")
int xdp_floor_lookup(struct xdp_md *ctx)
{
	const struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;
	const __u64 *word;
	__u32 number;

	if ((const void *)(ip + 1) > frame_end(ctx))
		return XDP_DROP;
	number = spread(ip->saddr.s6_addr32[3] * GOLDEN_RATIO) >> table_shift;
	word = bpf_map_lookup_elem(&table, &number);
	return word ? encapsulate(ctx, *word) : XDP_DROP; /* all words are 0 */
}
