/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Protection of the segment routing domain (RFC 8754 section 5.1). Packets from outside must not
 * choose their path inside: they are dropped if their destination is a SID of the domain or if they
 * have segments left. Where the interface is internal, the verifier removes this code.
 */
#ifndef SEGUE_BALANCER_PATH_DOMAIN_H
#define SEGUE_BALANCER_PATH_DOMAIN_H

#include "net/host.h"
#include "net/srv6.h"
#include "net/underlay.h"
#include "balancer/path/unwrap.h"
#include "balancer/stats.h"

/* Locators of the balancer and of all servers, in memory order. While they are replaced, old and
 * new ones are here. */
#define MAX_LOCATORS 131072
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_LOCATORS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} locators SEC(".maps");

/* Whether the address is a SID with a function, at a host of the domain. */
static __always_inline bool is_domain_sid(const struct in6_addr *address)
{
	__u64 locator = *(const __u64 *)address;

	return sid_function(address) != SID_HOST && bpf_map_lookup_elem(&locators, &locator);
}

/* Returns `why`, or LB_DROP_OUTSIDE for a packet from outside the domain that chooses its path
 * inside. `why` is the reason of the packet so far. */
static __always_inline enum lb_reason drop_if_intruder(const struct packet *pkt, enum lb_reason why)
{
	if (!host_is_outside)
		return why;
	if (why == LB_DROP_ROUTING_HEADER)
		return LB_DROP_OUTSIDE;
	if (why == LB_PASS_NOT_VIP && is_domain_sid(&pkt->key.destination))
		return LB_DROP_OUTSIDE;
	return why;
}

/* Whether a packet came by the underlay: it is to this host's port of it. */
static __always_inline bool is_underlaid(const struct packet *pkt)
{
	const struct flow_key *key = &pkt->key;

	return underlay_port && key->destination_port == underlay_port &&
	       key->protocol == IPPROTO_UDP && is_ipv4(&key->destination) &&
	       key->destination.s6_addr32[3] == underlay_address(node_locator);
}

/* Takes a packet out of the underlay, and parses it again. Only packets to the balancer itself come
 * by the underlay. Returns LB_NONE, or why the packet is dropped. Not inlined: see
 * handle_in_full. */
__noinline int take_underlaid(struct xdp_md *ctx, struct packet *pkt)
{
	enum parse_result result;

	if (!pkt || !underlay_port)
		return LB_DROP_UNDERLAY;
	if (host_is_outside)
		return LB_DROP_OUTSIDE;
	switch (remove_underlay(ctx, node_locator)) {
	case UNDERLAY_REMOVED:
		break;
	case UNDERLAY_STRANGER:
		return LB_DROP_STRANGER;
	default:
		return LB_DROP_UNDERLAY;
	}
	__builtin_memset(pkt, 0, sizeof(*pkt));
	result = parse(ctx, pkt);
	return result && is_to_balancer(pkt, result) ? LB_NONE : LB_DROP_UNDERLAY;
}

#endif
