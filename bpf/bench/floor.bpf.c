/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The least work of any balancer for `srv6-insert`: check that there is a packet, make room, write
 * the headers, and send the packet. The program looks nothing up.
 */
#include "net/parse.h"
#include "net/srv6.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define SEGMENTS 3 /* VIP, server, balancer */

/* MAC addresses of the only server. User space sets them. */
__u64 to_mac, from_mac;
struct in6_addr server, balancer;

SEC("xdp")
int xdp_floor(struct xdp_md *ctx)
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
	return XDP_TX;
}
