/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Forwarding: encapsulates and sends a packet whose servers are known.
 */
#ifndef SEGUE_BALANCER_PATH_FORWARD_H
#define SEGUE_BALANCER_PATH_FORWARD_H

#include "balancer/path/answer.h"
#include "balancer/path/encap.h"
#include "net/host.h"
#include "balancer/tables/maps.h"
#include "net/parse.h"
#include "balancer/segments.h"
#include "balancer/stats.h"

/* Encapsulates the packet for `count` servers. Returns LB_NONE, or why it cannot be sent. Inlined
 * for each kind, with the underlay and without, so that sizes of headers are constants. */
static __always_inline enum lb_reason send_as(struct xdp_md *ctx, enum encapsulation kind,
					      struct encap *encap, __u32 count, __u64 next_hop,
					      const struct port *port, __u32 underlay)
{
	encap->count = count;
	encap->underlay = underlay;
	encap->size = encap_size(kind, encap);
	if (encap->pkt->length + encap->size + underlay > port->mtu)
		return refuse_length(ctx, encap->pkt, port->mtu - (int)(encap->size + underlay));
	if (!encapsulate(ctx, kind, encap) ||
	    !write_ethernet(encap, next_hop, port, outer_ethertype(kind, encap)))
		return LB_DROP_NO_HEADROOM;
	return LB_NONE;
}

/* Notes a server that a packet visits, and the low bits of its SID. */
static __always_inline void note_segment(__u32 i, __u32 server, __u64 sid_low)
{
	decision.segment[i].server = server;
	decision.segment[i].function = sid_low_function(sid_low);
	decision.segment[i].argument = bpf_be64_to_cpu(sid_low) & SID_ARGUMENT_MASK;
}

/* Notes the servers that a packet visits behind the first one. Not inlined: the verifier walks it
 * once. */
__noinline int note_further_segments(const struct segments *segments, __u32 count)
{
	if (!dry_run || !segments)
		return 0;
	for (__u32 i = 1; i < MAX_SEGMENTS && i < count; i++) {
		__u32 sid = i + 1 < count ? segments->sid : segments->last_sid;

		note_segment(i, segments->server[i], sid | argument_of(segments, i));
	}
	return 0;
}

/* Notes the servers that a packet visits, and its encapsulation. */
static __always_inline void note_segments(enum encapsulation kind, const struct encap *encap)
{
	const struct segments *segments = encap->segments;
	const struct server *server = encap->server;

	if (!dry_run || !server)
		return;
	decision.count = encap->count;
	decision.added = encap_size(kind, encap) + underlay_size(kind);
	decision.mtu = server->next_hop ? port_at(NEXT_HOP_PORT(server->next_hop))->mtu : 0;
	note_segment(0, segments->server[0], segments->first_sid ?: server->known_sid);
	if (encap->count > 1)
		note_further_segments(segments, encap->count);
}

/* Encapsulates the packet for the first `count` of its servers. Returns the port that leads to the
 * first server, or NULL with the reason in `failed`. */
static __always_inline const struct port *send(struct xdp_md *ctx, const struct packet *pkt,
					       const struct service *service,
					       const struct segments *segments, __u32 count,
					       __u32 flow_label, enum lb_reason *failed)
{
	const struct server *server = segments->first_server;
	__u64 next_hop = server ? *(volatile __u64 *)&server->next_hop : 0;
	const struct port *port = port_at(NEXT_HOP_PORT(next_hop));
	struct encap encap = {
		.pkt = pkt,
		.segments = segments,
		.server = server,
		.flow_label = flow_label,
		.count = count,
	};

	note_segments(service->rule.encapsulation, &encap);
	*failed = LB_DROP_NO_NEXT_HOP;
	if (!next_hop)
		return NULL;
	if (pkt->hop_limit <= 1) {
		*failed = refuse_hop_limit(ctx, pkt);
		return NULL;
	}
	switch (service->rule.encapsulation) {
	case ENCAP_SRV6_INSERT:
		*failed = send_as(ctx, ENCAP_SRV6_INSERT, &encap, count, next_hop, port, 0);
		break;
	case ENCAP_SRV6_ENCAP:
		*failed = underlay_port ? send_as(ctx, ENCAP_SRV6_ENCAP, &encap, count, next_hop,
						  port, UNDERLAY_SIZE)
					: send_as(ctx, ENCAP_SRV6_ENCAP, &encap, count, next_hop,
						  port, 0);
		break;
	case ENCAP_GRE:
		*failed = send_as(ctx, ENCAP_GRE, &encap, 1, next_hop, port, 0);
		break;
	case ENCAP_IPIP:
		*failed = send_as(ctx, ENCAP_IPIP, &encap, 1, next_hop, port, 0);
		break;
	}
	return *failed ? NULL : port;
}

/* Sends the frame out by a port, and returns the verdict. */
static __always_inline int transmit(const struct port *port)
{
	return port->ifindex == host_hairpin ? XDP_TX : bpf_redirect(port->ifindex, 0);
}

/* Sends the frame out by the interface that it came in by. */
static __always_inline int send_back(const struct xdp_md *ctx)
{
	return host_hairpin ? XDP_TX : bpf_redirect(ctx->ingress_ifindex, 0);
}

/* Counts a packet that goes to no server, and returns its verdict. */
static __always_inline int leave(const struct xdp_md *ctx, const struct packet *pkt,
				 enum lb_reason why)
{
	count_packet(why, pkt);
	if (is_answer(why))
		return send_back(ctx);
	/* Packets with a reason before this one in the enum pass to the kernel. */
	return why < LB_FORWARD_KNOWN ? XDP_PASS : XDP_DROP;
}

/* Sends the packet to the servers that were found. `first` is the first of them, which the caller
 * knows without reading memory. `count` is their number, a constant where there can be only one.
 * `found` says how they were found (is_forward). */
static __always_inline int forward(struct xdp_md *ctx, const struct packet *pkt,
				   const struct service *service, const struct segments *segments,
				   __u32 first, __u32 count, __u32 flow_label, enum lb_reason found)
{
	const struct port *port;
	enum lb_reason failed;

	port = send(ctx, pkt, service, segments, count, flow_label, &failed);
	if (!port)
		return leave(ctx, pkt, failed);
	count_forwarded(first, found, pkt);
	return transmit(port);
}

#endif
