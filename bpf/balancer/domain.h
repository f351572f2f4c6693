/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What comes from outside the segment routing domain may not choose its way inside: no
 * SID of the domain is its destination, and it has no segments left (RFC 8754 section
 * 5.1). Where the interface is internal the verifier leaves all of this out.
 */
#ifndef SEGUE_BALANCER_DOMAIN_H
#define SEGUE_BALANCER_DOMAIN_H

#include "net/host.h"
#include "net/srv6.h"
#include "stats.h"

/* Those of the balancer and of all servers, in memory order: with those before, while
 * they are replaced. */
#define MAX_LOCATORS 131072
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_LOCATORS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} locators SEC(".maps");

/* Whether somebody in the domain would do more with it than take it as an address. */
static __always_inline bool is_domain_sid(const struct in6_addr *address)
{
	__u64 locator = *(const __u64 *)address;

	return sid_function(address) != SID_HOST && bpf_map_lookup_elem(&locators, &locator);
}

/* The reason in the end of a packet without a service, which was to leave for another. */
static __always_inline enum lb_reason judge(const struct packet *pkt, enum lb_reason why)
{
	if (!host_is_outside)
		return why;
	if (why == LB_DROP_ROUTING_HEADER)
		return LB_DROP_OUTSIDE;
	if (why == LB_PASS_NOT_VIP && is_domain_sid(&pkt->key.destination))
		return LB_DROP_OUTSIDE;
	return why;
}

#endif
