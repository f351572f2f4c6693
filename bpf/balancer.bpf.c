/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer's data path. A packet's way is one line:
 *
 *	parse -> classify -> persist -> place -> segments -> encapsulate -> transmit
 */
#include "fragment.h"
#include "icmp.h"
#include "persist.h"
#include "steer.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Makes the compiler describe to user space what no map's type mentions. */
const union {
	enum placement placement;
	enum persistence persistence;
	enum encapsulation encapsulation;
	enum server_flags server_flags;
	enum flow_state flow_state;
	enum service_entry_kind service_entry_kind;
	struct service_entry service_entry;
	enum reason reason;
	enum tables_version tables_version;
} *shared_types __attribute__((unused));

/* Finds the servers that the packet visits, and says how they were found. */
static __always_inline enum reason find_segments(const struct packet *pkt,
						 const struct service *service,
						 struct flow_slot *flow, struct segments *segments)
{
	__u64 now = flow_now();

	if (persist(pkt, service, flow, now, segments))
		return REASON_FORWARD_KNOWN;
	if (!place(&pkt->key, service, segments))
		return REASON_DROP_NO_SERVER;
	if (!remember(pkt, flow, now, segments))
		return REASON_FORWARD_NO_ROOM;
	if (pkt->key.protocol == IPPROTO_TCP && !starts_connection(pkt))
		return REASON_FORWARD_RECOVER;
	return REASON_FORWARD_NEW;
}

/* Finds the servers of what belongs to a flow without speaking for it. Of a flow
 * that is unknown any candidate may be the server. */
static __always_inline enum reason follow(const struct packet *pkt, const struct service *service,
					  struct flow_slot *flow, struct segments *segments)
{
	if (!recall(pkt, service, flow, segments) && !place(&pkt->key, service, segments))
		return REASON_DROP_NO_SERVER;
	return pkt->kind == PACKET_ICMP_ERROR ? REASON_FORWARD_ICMP : REASON_FORWARD_FRAGMENT;
}

/* Finds the flow that what is no whole packet of TCP or UDP belongs to; the reason
 * is none if there is one. */
static __always_inline enum reason read_unusual(struct xdp_md *ctx, struct packet *pkt,
						enum parse_error error, struct service *service)
{
	enum reason why = reason_of(error);

	if (why != REASON_PASS_NOT_IP)
		why = refuse(pkt, why);
	if (why == REASON_DROP_FRAGMENT)
		why = read_fragment(ctx, pkt);
	else if (why == REASON_DROP_PROTOCOL && is_icmp(pkt))
		why = read_icmp(ctx, pkt);
	if (why)
		return why;
	if (classify(pkt, service))
		return REASON_NONE;
	return pkt->kind == PACKET_ICMP_ERROR ? REASON_DROP_ICMP_NO_SERVICE
					      : REASON_DROP_NO_SERVICE;
}

/* The way of a packet that could not be parsed to the end. Not inlined: the verifier
 * walks it once, and the others' way stays short. */
__noinline int steer_unusual(struct xdp_md *ctx, struct packet *pkt, __u32 error)
{
	struct segments segments = {};
	struct service service = {};
	struct flow_slot flow = {};
	enum reason why;

	if (!pkt)
		return XDP_ABORTED;
	why = read_unusual(ctx, pkt, error, &service);
	if (!why)
		why = pkt->kind == PACKET_WHOLE ? find_segments(pkt, &service, &flow, &segments)
						: follow(pkt, &service, &flow, &segments);
	return forward(ctx, pkt, &service, &segments, flow_label(&flow), why);
}

SEC("xdp")
int xdp_lb(struct xdp_md *ctx)
{
	struct segments segments = {};
	struct flow_slot flow = {};
	struct packet pkt = {};
	struct service service;
	enum parse_error error;
	enum reason found;

	if (!for_host(ctx))
		return leave(ctx, &pkt, REASON_PASS_NOT_FOR_HOST, NULL);
	error = parse(ctx, &pkt);
	if (error)
		return steer_unusual(ctx, &pkt, error);
	if (!classify(&pkt, &service))
		return leave(ctx, &pkt, refuse(&pkt, REASON_DROP_NO_SERVICE), NULL);
	found = find_segments(&pkt, &service, &flow, &segments);
	return forward(ctx, &pkt, &service, &segments, flow_label(&flow), found);
}

/* Tells user space what the flow table's clock counts: only programs can read it. */
SEC("syscall")
int read_jiffies(__u64 *jiffies)
{
	*jiffies = bpf_jiffies64();
	return 0;
}
