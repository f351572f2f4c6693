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

/* What is no whole packet of TCP or UDP: finds out which flow it belongs to. */
static __always_inline enum reason find_unusual(struct xdp_md *ctx, struct packet *pkt,
						enum parse_error error, struct service *service,
						struct flow_slot *flow, struct segments *segments)
{
	enum reason why = refuse(pkt, reason_of(error));

	*service = (struct service){}; /* the verifier does not know what `why` can be */
	if (why == REASON_DROP_FRAGMENT)
		why = read_fragment(ctx, pkt);
	else if (why == REASON_DROP_PROTOCOL && is_icmp(pkt))
		why = read_icmp(ctx, pkt);
	if (why)
		return why;
	if (!classify(pkt, service))
		return pkt->kind == PACKET_ICMP_ERROR ? REASON_DROP_ICMP_NO_SERVICE
						      : REASON_DROP_NO_SERVICE;
	if (pkt->kind == PACKET_WHOLE)
		return find_segments(pkt, service, flow, segments);
	return follow(pkt, service, flow, segments);
}

static __always_inline enum reason steer(struct xdp_md *ctx, struct packet *pkt,
					 const struct port **port)
{
	struct segments segments = {};
	struct flow_slot flow = {};
	struct service service;
	enum reason found, failed;
	enum parse_error error;

	if (!for_host(ctx))
		return REASON_PASS_NOT_FOR_HOST;
	error = parse(ctx, pkt);
	if (error == PARSE_NOT_IP)
		return REASON_PASS_NOT_IP;
	if (error)
		found = find_unusual(ctx, pkt, error, &service, &flow, &segments);
	else if (classify(pkt, &service))
		found = find_segments(pkt, &service, &flow, &segments);
	else
		found = refuse(pkt, REASON_DROP_NO_SERVICE);
	if (!is_forward(found))
		return found;
	failed = send(ctx, pkt, &service, &segments, flow_label(&flow), port);
	if (failed)
		return failed;
	count_server(segments.server[0], pkt, found);
	return found;
}

SEC("xdp")
int xdp_lb(struct xdp_md *ctx)
{
	const struct port *port = NULL;
	struct packet pkt = {};
	enum reason why = steer(ctx, &pkt, &port);

	count(why, &pkt);
	if (why < REASON_FORWARD_KNOWN)
		return XDP_PASS;
	if (port)
		return transmit(ctx, port);
	if (is_answer(why))
		return send_back(ctx);
	return XDP_DROP;
}

/* Tells user space what the flow table's clock counts: only programs can read it. */
SEC("syscall")
int read_jiffies(__u64 *jiffies)
{
	*jiffies = bpf_jiffies64();
	return 0;
}
