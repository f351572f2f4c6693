/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The agent's data path. A packet's way is one line:
 *
 *	parse -> function -> decide -> deliver | next segment
 *
 * What is delivered goes up the host's own stack; what is for the next segment
 * leaves from tc ingress, right behind XDP. Replies go straight to the client:
 * all that the agent does to them is to clamp the MSS of SYN-ACKs.
 */
#include "agent_maps.h"
#include "agent_stats.h"
#include "decap.h"
#include "envelope.h"
#include "host.h"
#include "mss.h"
#include "next_segment.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Makes the compiler describe these enumerations in the object, where user space
 * reads the names of the counters. */
const union {
	enum reason reason;
	enum syn_ack syn_ack;
} *shared_types __attribute__((unused));

/* The VIP of an inserted header is a segment too, but no server. */
static __always_inline bool is_last_server(const struct envelope *envelope)
{
	return envelope->segments_left <= (envelope->encapsulation == ENCAP_SRV6_INSERT);
}

static __always_inline bool is_tunneled(const struct envelope *envelope)
{
	return envelope->encapsulation == ENCAP_GRE || envelope->encapsulation == ENCAP_IPIP;
}

/* In the table the IPv4-mapped form says IPv4; no IPv6 packet may claim it. */
static __always_inline bool is_served(const struct envelope *envelope)
{
	if (envelope->ethertype != bpf_htons(ETH_P_IP) && is_ipv4(&envelope->vip))
		return false;
	return bpf_map_lookup_elem(&vips, &envelope->vip);
}

/* Delivers what is for a VIP of this server; else finds out who may have it. */
static __always_inline enum reason decide(struct xdp_md *ctx, const struct envelope *envelope)
{
	if (is_served(envelope)) {
		if (envelope->encapsulation != ENCAP_SRV6_INSERT && !envelope->inner_fits)
			return REASON_DROP_INNER_HEADER;
		return deliver(ctx, envelope);
	}
	if (is_tunneled(envelope))
		return REASON_PASS_OTHER_TUNNEL;
	if (is_last_server(envelope))
		return REASON_DROP_NOT_SERVED;
	if (envelope->hop_limit <= 1)
		return REASON_DROP_HOP_LIMIT;
	return REASON_NEXT_SEGMENT;
}

static __always_inline enum reason receive(struct xdp_md *ctx)
{
	struct envelope envelope = {};
	enum reason why;

	if (!for_host(ctx))
		return REASON_PASS_NOT_FOR_HOST;
	why = open(ctx, &envelope);
	if (why)
		return why;
	return decide(ctx, &envelope);
}

SEC("xdp")
int xdp_agent(struct xdp_md *ctx)
{
	__u32 bytes = ctx->data_end - ctx->data - ETH_HLEN; /* never fewer */
	enum reason why = receive(ctx);

	count(why, bytes);
	return why < REASON_DROP_IP_HEADER ? XDP_PASS : XDP_DROP;
}

SEC("tc")
int tc_forward(struct __sk_buff *skb)
{
	struct ipv6hdr ip;

	if (!left_for_next_segment(skb, &ip))
		return TC_ACT_UNSPEC;
	if (!advance(skb, &ip)) {
		count(REASON_DROP_REWRITE, skb->len - ETH_HLEN);
		return TC_ACT_SHOT;
	}
	return bpf_redirect_neigh(skb->ifindex, NULL, 0, 0);
}

SEC("tc")
int tc_agent(struct __sk_buff *skb)
{
	clamp_mss(skb);
	return TC_ACT_UNSPEC;
}
