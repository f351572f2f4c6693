/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer's data path. A packet's way is one line:
 *
 *	parse -> classify -> persist -> place -> segments -> encapsulate -> transmit
 */
#include "encap.h"
#include "host.h"
#include "maps.h"
#include "parse.h"
#include "persist.h"
#include "place.h"
#include "stats.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Makes the compiler describe to user space what no map's type mentions. */
const union {
	enum placement placement;
	enum persistence persistence;
	enum encapsulation encapsulation;
	enum server_flags server_flags;
	enum flow_state flow_state;
	enum reason reason;
} *shared_types __attribute__((unused));

/* What becomes of a packet that no service takes: `why`, if it is for a VIP;
 * else it is none of our business. */
static __always_inline enum reason refuse(const struct packet *pkt, enum reason why)
{
	if (!pkt->ethertype || !bpf_map_lookup_elem(&vips, &pkt->key.destination))
		return REASON_PASS_NOT_VIP;
	return why;
}

static __always_inline const struct service *classify(const struct packet *pkt)
{
	struct service_key key = {
		.vip = pkt->key.destination,
		.port = pkt->key.destination_port,
		.protocol = pkt->key.protocol,
	};
	const struct service *service = bpf_map_lookup_elem(&services, &key);

	if (service)
		return service;
	key.port = 0;
	return bpf_map_lookup_elem(&services, &key);
}

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

static __always_inline void count_server(__u32 number, const struct packet *pkt, enum reason why)
{
	struct server_counter *counter = bpf_map_lookup_elem(&server_counters, &number);

	if (!counter)
		return;
	counter->packets++;
	counter->bytes += pkt->length;
	counter->flows += why == REASON_FORWARD_NEW;
}

/* Wraps the packet for its servers and sends it to the first. */
static __always_inline enum reason send(struct xdp_md *ctx, const struct packet *pkt,
					const struct service *service, const struct flow_slot *flow,
					const struct segments *segments, const struct port **out)
{
	__u32 number = segments->server[0];
	const struct server *server = bpf_map_lookup_elem(&servers, &number);
	__u64 next_hop = server ? *(volatile __u64 *)&server->next_hop : 0;
	__u32 port_number = NEXT_HOP_PORT(next_hop);
	const struct port *port = bpf_map_lookup_elem(&ports, &port_number);
	struct encap encap = { .pkt = pkt, .segments = segments, .server = server };

	if (!server || !next_hop || !port)
		return REASON_DROP_NO_NEXT_HOP;
	if (pkt->hop_limit <= 1)
		return REASON_DROP_HOP_LIMIT;
	encap.size = encap_size(service->encapsulation, segments, server);
	encap.flow_label = flow->signature >> FLOW_SIGNATURE_SHIFT & FLOW_LABEL_MASK;
	if (pkt->length + encap.size > port->mtu)
		return REASON_DROP_TOO_BIG;
	if (!encapsulate(ctx, service->encapsulation, &encap))
		return REASON_DROP_NO_HEADROOM;
	if (!write_ethernet(ctx, next_hop, port,
			    bpf_htons(server->flags & SERVER_IPV4 ? ETH_P_IP : ETH_P_IPV6)))
		return REASON_DROP_NO_HEADROOM;
	*out = port;
	return REASON_NONE;
}

static __always_inline enum reason steer(struct xdp_md *ctx, struct packet *pkt,
					 const struct port **port)
{
	struct segments segments = {};
	struct flow_slot flow = {};
	const struct service *service;
	enum reason found, failed;
	enum parse_error error;

	if (!for_host(ctx))
		return REASON_PASS_NOT_FOR_HOST;
	error = parse(ctx, pkt);
	if (error == PARSE_NOT_IP)
		return REASON_PASS_NOT_IP;
	if (error)
		return refuse(pkt, reason_of(error));
	service = classify(pkt);
	if (!service)
		return refuse(pkt, REASON_DROP_NO_SERVICE);
	found = find_segments(pkt, service, &flow, &segments);
	if (found == REASON_DROP_NO_SERVER)
		return found;
	failed = send(ctx, pkt, service, &flow, &segments, port);
	if (failed)
		return failed;
	count_server(segments.server[0], pkt, found);
	return found;
}

static __always_inline int transmit(const struct xdp_md *ctx, const struct port *port)
{
	if (port->hairpin && port->ifindex == ctx->ingress_ifindex)
		return XDP_TX;
	return bpf_redirect(port->ifindex, 0);
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
	return XDP_DROP;
}
