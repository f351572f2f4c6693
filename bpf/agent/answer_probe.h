/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The agent's side of probes (net/probe.h). XDP turns a probe into its answer, and tc sends the
 * answer back to the neighbour that the probe came from. So the server needs no route to the
 * balancer. XDP does not send the answer itself, because XDP_TX to a veth interface needs an XDP
 * program at the far end.
 */
#ifndef SEGUE_AGENT_ANSWER_PROBE_H
#define SEGUE_AGENT_ANSWER_PROBE_H

#include <linux/pkt_cls.h>

#include "maps.h"
#include "envelope.h"
#include "handshake.h"
#include "listener.h"
#include "net/host.h"
#include "next_segment.h"
#include "net/probe.h"
#include "net/report.h"

#define ANSWER_HOP_LIMIT 64
#define ANSWER_SIZE (ETH_HLEN + sizeof(struct ipv6hdr) + sizeof(struct probe_answer))
/* The headers of a balancer's probe are no longer than this, in bytes: two IPv6 headers, and a list
 * of three segments. */
#define MAX_PROBE_HEADERS (2 * sizeof(struct ipv6hdr) + srh_size(3))

/* Offset of the token in a probe, behind all headers; 0: the probe is malformed. */
static __always_inline __u32 token_offset(struct xdp_md *ctx, const struct envelope *envelope)
{
	__u32 offset = ETH_HLEN + envelope->size;
	/* The mask is for the verifier: see MAX_PROBE_HEADERS. */
	const __u8 *inner = frame_start(ctx) + (offset & 0xff);

	if (envelope->size > MAX_PROBE_HEADERS)
		return 0;
	if (envelope->encapsulation == ENCAP_SRV6_INSERT)
		return envelope->next_header == NO_NEXT_HEADER ? offset : 0;
	if ((const void *)inner + sizeof(struct iphdr) > frame_end(ctx))
		return 0;
	if (envelope->ethertype == bpf_htons(ETH_P_IP))
		return inner[offsetof(struct iphdr, protocol)] == NO_NEXT_HEADER
			       ? offset + sizeof(struct iphdr)
			       : 0;
	return inner[offsetof(struct ipv6hdr, nexthdr)] == NO_NEXT_HEADER
		       ? offset + sizeof(struct ipv6hdr)
		       : 0;
}

/* Reads the data of a probe. False when there is no token. A probe that has only a token asks about
 * no service. */
static __always_inline bool read_request(struct xdp_md *ctx, const struct envelope *envelope,
					 struct probe_request *request)
{
	const struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;
	__u32 offset = token_offset(ctx, envelope), end;
	const struct probe_request *data = frame_start(ctx) + (offset & 0xff);

	if (!offset || (const void *)(ip + 1) > frame_end(ctx) ||
	    (const void *)(&data->token + 1) > frame_end(ctx))
		return false;
	end = ETH_HLEN + sizeof(*ip) + bpf_ntohs(ip->payload_len);
	if (offset + sizeof(data->token) > end)
		return false;
	request->token = data->token;
	if ((const void *)(data + 1) <= frame_end(ctx) && offset + sizeof(*data) <= end)
		*request = *data;
	return true;
}

/* Whether the VIP is an address of this host. User space keeps the table up to date. */
static __always_inline bool is_present(const struct in6_addr *vip)
{
	const __u32 *present = bpf_map_lookup_elem(&vips, vip);

	return present && *present;
}

/* Turns the frame into the answer, which keeps the Ethernet addresses. False: it failed. */
static __always_inline bool write_answer(struct xdp_md *ctx, const struct envelope *envelope,
					 __u64 token, __u16 flags)
{
	int size = bpf_xdp_get_buff_len(ctx);
	struct probe_answer *answer;
	struct ipv6hdr *ip;

	if (bpf_xdp_adjust_tail(ctx, (int)ANSWER_SIZE - size))
		return false;
	ip = frame_start(ctx) + ETH_HLEN;
	answer = (void *)(ip + 1);
	if ((void *)(answer + 1) > frame_end(ctx))
		return false;
	*(__be32 *)ip = bpf_htonl(6 << 28);
	ip->payload_len = bpf_htons(sizeof(*answer));
	ip->nexthdr = NO_NEXT_HEADER;
	ip->hop_limit = ANSWER_HOP_LIMIT;
	((__u64 *)&ip->saddr)[0] = node_locator;
	((__u64 *)&ip->saddr)[1] = SID_LOW(SID_HOST);
	((__u64 *)&ip->daddr)[0] = envelope->sender;
	((__u64 *)&ip->daddr)[1] = SID_LOW(SID_PROBE);
	answer->token = token;
	answer->version = bpf_htons(PROTOCOL_VERSION);
	answer->flags = bpf_htons(flags);
	answer->clock = bpf_htonl(PROBE_CLOCK_VALID | serial_now());
	return true;
}

/* Answers a probe, or returns the reason for a drop. `serves`: this server has the VIP of the
 * probe. */
static __always_inline enum agent_reason answer_probe(struct xdp_md *ctx,
						      const struct envelope *envelope, bool serves)
{
	__u16 flags = serves && is_present(&envelope->vip) ? PROBE_SERVED : 0;
	struct probe_request request = {};

	if (!is_balancer(envelope->sender))
		return AGENT_DROP_SENDER;
	if (!read_request(ctx, envelope, &request))
		return AGENT_DROP_PROBE;
	if (flags && request.protocol == IPPROTO_TCP &&
	    is_refusing(ctx, &envelope->vip, request.port))
		flags |= PROBE_REFUSING;
	return write_answer(ctx, envelope, request.token, flags) ? AGENT_ANSWER_PROBE
								 : AGENT_DROP_REWRITE;
}

/* Whether the frame is to this host's MAC address. */
static __always_inline bool is_to_host(const struct __sk_buff *skb)
{
	__u64 destination;

	return !bpf_skb_load_bytes(skb, 0, &destination, sizeof(destination)) &&
	       is_host(&destination);
}

/* Whether the packet is an answer that xdp_agent has left to tc. A host on the link can forge such
 * a packet, and then gets it back. */
static __always_inline bool is_probe_answer(const struct __sk_buff *skb, const struct ipv6hdr *ip)
{
	return ip->nexthdr == NO_NEXT_HEADER && sid_function(&ip->daddr) == SID_PROBE &&
	       in_node_locator(&ip->saddr) && sid_function(&ip->saddr) == SID_HOST &&
	       is_to_host(skb);
}

/* Sends the frame back to the neighbour that it came from. */
static __always_inline int turn_back(struct __sk_buff *skb)
{
	__u8 old[2 * ETH_ALEN], turned[2 * ETH_ALEN];

	if (bpf_skb_load_bytes(skb, 0, old, sizeof(old)))
		return TC_ACT_SHOT;
	__builtin_memcpy(turned, old + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(turned + ETH_ALEN, old, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, turned, sizeof(turned), 0))
		return TC_ACT_SHOT;
	return bpf_redirect(skb->ifindex, 0);
}

#endif
