/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments. The first fragment of a packet has the ports: it takes the path of a whole packet, and
 * its flow is stored (`fragments`). Later fragments follow it. Those that come before it are held
 * (hold.h).
 */
#ifndef SEGUE_BALANCER_PATH_FRAGMENT_H
#define SEGUE_BALANCER_PATH_FRAGMENT_H

#include "balancer/decision.h"
#include "balancer/path/hold.h"
#include "net/parse.h"
#include "balancer/stats.h"

/* How long later fragments may come after the first one. Fragments travel together, and the IPv4
 * identifications of a fast sender wrap around soon (RFC 4963). */
#define FRAGMENT_LIFETIME 5000000000ULL /* ns */

/* Holds a later fragment until the first one comes. `is_outdated`: the packet's entry in
 * `fragments` is too old. Linux 6.1 takes no key from a parameter of a global function, so
 * hold_fragment() cannot write the entry. */
static __always_inline enum lb_reason await_first(struct xdp_md *ctx,
						  const struct fragment_key *key, bool is_outdated)
{
	struct fragment_flow awaited = {};
	enum lb_reason why = may_hold(ctx, key);

	if (why)
		return why;
	/* The entry is written before user space gets the fragment. User space then looks whether
	 * another core has overwritten the entry, because the first fragment has passed on that
	 * core. */
	bpf_map_update_elem(&fragments, key, &awaited, is_outdated ? BPF_ANY : BPF_NOEXIST);
	return hold_fragment(ctx, key);
}

/* Gives a later fragment the flow of its packet's first fragment, or holds it until that one
 * comes. */
static __always_inline enum lb_reason
read_later_fragment(struct xdp_md *ctx, const struct fragment_key *key, struct packet *pkt)
{
	const struct fragment_flow *first = bpf_map_lookup_elem(&fragments, key);

	if (!first || !first->seen || bpf_ktime_get_coarse_ns() - first->seen > FRAGMENT_LIFETIME)
		return await_first(ctx, key, first && first->seen);
	pkt->key.source_port = first->source_port;
	pkt->key.destination_port = first->destination_port;
	set_protocol(pkt, first->protocol);
	pkt->kind = PACKET_LATER_FRAGMENT;
	return LB_NONE;
}

/* Reads a first fragment, which must include all headers (RFC 7112), and stores its flow for later
 * fragments. If user space holds fragments that came before it, user space is told. */
static __always_inline enum lb_reason
read_first_fragment(struct cursor *at, const struct fragment_key *key, struct packet *pkt)
{
	enum parse_result result = parse_transport(at, pkt, false);
	const struct fragment_flow *before = bpf_map_lookup_elem(&fragments, key);
	bool is_awaited = before && !before->seen;
	struct fragment_flow flow = {
		.seen = bpf_ktime_get_coarse_ns(),
		.source_port = pkt->key.source_port,
		.destination_port = pkt->key.destination_port,
		.protocol = pkt->key.protocol,
	};

	if (result == PARSE_OTHER_PROTOCOL)
		return LB_DROP_PROTOCOL;
	if (result)
		return LB_DROP_FRAGMENT;
	if (!dry_run)
		bpf_map_update_elem(&fragments, key, &flow, BPF_ANY);
	if (is_awaited)
		release_fragments(key);
	pkt->visits_all = true;
	return LB_NONE;
}

/* Reads a fragment to a VIP. The reason is none if its flow is known. Not inlined: the verifier
 * walks it once, and only fragments take this path. */
__noinline int read_fragment(struct xdp_md *ctx, struct packet *pkt)
{
	struct fragment fragment = {};
	struct fragment_key key = {};
	struct cursor at = {};
	enum parse_result result;

	if (!pkt)
		return LB_DROP_FRAGMENT;
	result = parse_network(ctx, &at, pkt, &fragment);
	if (result)
		return reason_of(result);
	key.source = pkt->key.source;
	key.destination = pkt->key.destination;
	key.identification = fragment.identification;
	if (pkt->ethertype == bpf_htons(ETH_P_IP))
		key.protocol = pkt->key.protocol;
	return fragment.is_later ? read_later_fragment(ctx, &key, pkt)
				 : read_first_fragment(&at, &key, pkt);
}

#endif
