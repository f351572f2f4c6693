/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Decapsulation. Afterwards the frame is as the client sent it, except for its hop limit, which the
 * balancer has decremented, and for congestion marks from the path to the server.
 */
#ifndef SEGUE_AGENT_DECAP_H
#define SEGUE_AGENT_DECAP_H

#include "net/ecn.h"
#include "envelope.h"

/* Bytes of the longest extension header: 256 units of 8. */
#define MAX_EXTENSION 2048

/* Writes the ECN field of the inner header, which is right behind Ethernet's. */
static __always_inline bool set_inner_ecn(const struct xdp_md *ctx, const struct envelope *envelope,
					  __u8 ecn)
{
	void *layer3 = frame_start(ctx) + ETH_HLEN;

	if (envelope->ethertype == bpf_htons(ETH_P_IP)) {
		if (layer3 + sizeof(struct iphdr) > frame_end(ctx))
			return false;
		set_ipv4_ecn(layer3, ecn);
	} else {
		if (layer3 + sizeof(struct ipv6hdr) > frame_end(ctx))
			return false;
		set_ipv6_ecn(layer3, ecn);
	}
	return true;
}

/* Removes the headers in front of an inner packet. */
static __always_inline enum agent_reason decapsulate(struct xdp_md *ctx,
						     const struct envelope *envelope)
{
	int ecn = combine_ecn(envelope->inner_class, envelope->traffic_class);
	struct ethhdr *ethernet = frame_start(ctx);
	struct ethhdr saved;

	if (ecn < 0)
		return AGENT_DROP_ECN;
	if ((void *)(ethernet + 1) > frame_end(ctx))
		return AGENT_DROP_REWRITE;
	saved = *ethernet;
	saved.h_proto = envelope->ethertype;
	if (bpf_xdp_adjust_head(ctx, envelope->size))
		return AGENT_DROP_REWRITE;
	ethernet = frame_start(ctx);
	if ((void *)(ethernet + 1) > frame_end(ctx))
		return AGENT_DROP_REWRITE;
	*ethernet = saved;
	if (ecn != (envelope->inner_class & ECN_MASK) && !set_inner_ecn(ctx, envelope, ecn))
		return AGENT_DROP_REWRITE;
	return AGENT_NONE;
}

/*
 * Moves `size` bytes of hop-by-hop options `distance` bytes towards the end, over the segment
 * routing header behind them. The last word moves first, because old and new place may overlap.
 * Returns 0, or -1 when the frame is too short. Not inlined: the verifier walks the loop once, and
 * almost no packet has options.
 */
__noinline int move_options_back(struct xdp_md *ctx, __u32 distance, __u32 size)
{
	void *options = frame_start(ctx) + ETH_HLEN + sizeof(struct ipv6hdr);

	for (__u32 i = sizeof(__u64); i <= MAX_EXTENSION && i <= size; i += sizeof(__u64)) {
		__u64 *from = options + ((size - i) & (MAX_EXTENSION - 1));
		__u64 *to = (void *)from + (distance & (2 * MAX_EXTENSION - 1));

		if ((void *)(from + 1) > frame_end(ctx) || (void *)(to + 1) > frame_end(ctx))
			return -1;
		*to = *from;
	}
	return 0;
}

/* The next-header field that announces the segment routing header. */
static __always_inline __u8 *field_naming_srh(struct ipv6hdr *ip, const struct envelope *envelope)
{
	struct extension_header *options = (void *)(ip + 1);

	return envelope->options ? &options->next_header : &ip->nexthdr;
}

/* Removes an inserted segment routing header: moves the headers in front of it over its end. */
static __always_inline enum agent_reason remove_srh(struct xdp_md *ctx,
						    const struct envelope *envelope)
{
	struct ethhdr *ethernet = frame_start(ctx), saved_ethernet;
	struct ipv6hdr *ip = (void *)(ethernet + 1), saved_ip;

	if ((void *)(ip + 1) + sizeof(struct extension_header) > frame_end(ctx))
		return AGENT_DROP_REWRITE;
	*field_naming_srh(ip, envelope) = envelope->next_header;
	saved_ethernet = *ethernet;
	saved_ip = *ip;
	saved_ip.payload_len = bpf_htons(bpf_ntohs(ip->payload_len) - envelope->srh);
	saved_ip.daddr = envelope->vip;
	if (envelope->options && move_options_back(ctx, envelope->srh, envelope->options))
		return AGENT_DROP_REWRITE;
	if (bpf_xdp_adjust_head(ctx, envelope->srh))
		return AGENT_DROP_REWRITE;
	ethernet = frame_start(ctx);
	ip = (void *)(ethernet + 1);
	if ((void *)(ip + 1) > frame_end(ctx))
		return AGENT_DROP_REWRITE;
	*ethernet = saved_ethernet;
	*ip = saved_ip;
	return AGENT_NONE;
}

/* Decapsulates the client's packet, for the host's own stack. */
static __always_inline enum agent_reason deliver(struct xdp_md *ctx,
						 const struct envelope *envelope)
{
	enum agent_reason failed = envelope->encapsulation == ENCAP_SRV6_INSERT
					   ? remove_srh(ctx, envelope)
					   : decapsulate(ctx, envelope);

	if (failed)
		return failed;
	switch (envelope->encapsulation) {
	case ENCAP_SRV6_INSERT:
		return AGENT_DELIVER_SRV6_INSERT;
	case ENCAP_SRV6_ENCAP:
		return AGENT_DELIVER_SRV6_ENCAP;
	case ENCAP_GRE:
		return AGENT_DELIVER_GRE;
	default:
		return AGENT_DELIVER_IPIP;
	}
}

#endif
