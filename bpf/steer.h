/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The steps that do not depend on how flows are remembered: which service a
 * packet is for, and its way out to the servers that were found.
 */
#ifndef SEGUE_STEER_H
#define SEGUE_STEER_H

#include "answer.h"
#include "encap.h"
#include "host.h"
#include "maps.h"
#include "parse.h"
#include "place.h"
#include "stats.h"

/* What becomes of a packet that no service takes: `why`, if it is for a VIP;
 * else it is none of our business. */
static __always_inline enum reason refuse(const struct packet *pkt, enum reason why)
{
	if (!pkt->ethertype || !is_vip(&pkt->key.destination))
		return REASON_PASS_NOT_VIP;
	return why;
}

static __always_inline void count_server(__u32 number, const struct packet *pkt, enum reason why)
{
	struct server_counter *counter = bpf_map_lookup_elem(&server_counters, &number);

	if (!counter)
		return;
	counter->packets++;
	counter->bytes += pkt->length;
	if (why == REASON_FORWARD_NEW)
		counter->flows++;
}

/* Wraps the packet for its servers and sends it to the first. */
static __always_inline enum reason send(struct xdp_md *ctx, const struct packet *pkt,
					const struct service *service,
					const struct segments *segments, __u32 flow_label,
					const struct port **out)
{
	const struct server *server = segments->first;
	__u64 next_hop = server ? *(volatile __u64 *)&server->next_hop : 0;
	__u32 port_number = NEXT_HOP_PORT(next_hop);
	const struct port *port = bpf_map_lookup_elem(&ports, &port_number);
	struct encap encap = { .pkt = pkt, .segments = segments, .server = server };

	if (!server || !next_hop || !port)
		return REASON_DROP_NO_NEXT_HOP;
	if (pkt->hop_limit <= 1)
		return expire(ctx, pkt);
	encap.size = encap_size(service->rule.encapsulation, segments, server);
	encap.flow_label = flow_label & FLOW_LABEL_MASK;
	if (pkt->length + encap.size > port->mtu)
		return refuse_length(ctx, pkt, port->mtu - (int)encap.size);
	if (!encapsulate(ctx, service->rule.encapsulation, &encap))
		return REASON_DROP_NO_HEADROOM;
	if (!write_ethernet(ctx, next_hop, port,
			    bpf_htons(server->flags & SERVER_IPV4 ? ETH_P_IP : ETH_P_IPV6)))
		return REASON_DROP_NO_HEADROOM;
	*out = port;
	return REASON_NONE;
}

static __always_inline int transmit(const struct xdp_md *ctx, const struct port *port)
{
	if (port->hairpin && port->ifindex == ctx->ingress_ifindex)
		return XDP_TX;
	return bpf_redirect(port->ifindex, 0);
}

/* Back where the packet came from. */
static __always_inline int send_back(const struct xdp_md *ctx)
{
	return host_hairpin ? XDP_TX : bpf_redirect(ctx->ingress_ifindex, 0);
}

/* The end of every packet's way. The port is where it goes; NULL: it stays. */
static __always_inline int leave(const struct xdp_md *ctx, const struct packet *pkt,
				 enum reason why, const struct port *port)
{
	count(why, pkt);
	if (why < REASON_FORWARD_KNOWN)
		return XDP_PASS;
	if (port)
		return transmit(ctx, port);
	return is_answer(why) ? send_back(ctx) : XDP_DROP;
}

#endif
