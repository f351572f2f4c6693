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

/* Inlined once for each kind, and once for the one segment that nearly all have: the
 * sizes of headers are constants then. */
static __always_inline enum reason send_as(struct xdp_md *ctx, enum encapsulation kind,
					   struct encap *encap, __u32 count, __u64 next_hop,
					   const struct port *port)
{
	encap->count = count;
	encap->size = encap_size(kind, encap);
	if (encap->pkt->length + encap->size > port->mtu)
		return refuse_length(ctx, encap->pkt, port->mtu - (int)encap->size);
	if (!encapsulate(ctx, kind, encap) ||
	    !write_ethernet(encap, next_hop, port, outer_ethertype(kind, encap)))
		return REASON_DROP_NO_HEADROOM;
	return REASON_NONE;
}

/* Wraps the packet for its servers, for the way to the first by the port `out`. */
static __always_inline enum reason send(struct xdp_md *ctx, const struct packet *pkt,
					const struct service *service,
					const struct segments *segments, __u32 flow_label,
					const struct port **out)
{
	const struct server *server = segments->first;
	__u64 next_hop = server ? *(volatile __u64 *)&server->next_hop : 0;
	__u32 port_number = NEXT_HOP_PORT(next_hop);
	const struct port *port = bpf_map_lookup_elem(&ports, &port_number);
	struct encap encap = {
		.pkt = pkt,
		.segments = segments,
		.server = server,
		.flow_label = flow_label,
	};

	if (!server || !next_hop || !port)
		return REASON_DROP_NO_NEXT_HOP;
	if (pkt->hop_limit <= 1)
		return expire(ctx, pkt);
	*out = port;
	switch (service->rule.encapsulation) {
	case ENCAP_SRV6_INSERT:
		if (segments->count == 1)
			return send_as(ctx, ENCAP_SRV6_INSERT, &encap, 1, next_hop, port);
		return send_as(ctx, ENCAP_SRV6_INSERT, &encap, segments->count, next_hop, port);
	case ENCAP_SRV6_ENCAP:
		return send_as(ctx, ENCAP_SRV6_ENCAP, &encap, segments->count, next_hop, port);
	case ENCAP_GRE:
		return send_as(ctx, ENCAP_GRE, &encap, 1, next_hop, port);
	case ENCAP_IPIP:
		return send_as(ctx, ENCAP_IPIP, &encap, 1, next_hop, port);
	}
	return REASON_DROP_NO_NEXT_HOP;
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

/* Sends the packet to the servers that were found for it, if they were. */
static __always_inline int forward(struct xdp_md *ctx, const struct packet *pkt,
				   const struct service *service, const struct segments *segments,
				   __u32 flow_label, enum reason found)
{
	const struct port *port = NULL;
	enum reason failed;

	if (!is_forward(found))
		return leave(ctx, pkt, found, NULL);
	failed = send(ctx, pkt, service, segments, flow_label, &port);
	if (failed)
		return leave(ctx, pkt, failed, NULL);
	count_server(segments->server[0], pkt, found);
	return leave(ctx, pkt, found, port);
}

#endif
