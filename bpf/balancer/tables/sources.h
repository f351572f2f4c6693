/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The source prefixes that may reach a service. A service without such prefixes is for all clients.
 * Only user space writes the table. It adds prefixes before the table of services says that the
 * service has them, and removes others after that.
 */
#ifndef SEGUE_BALANCER_TABLES_SOURCES_H
#define SEGUE_BALANCER_TABLES_SOURCES_H

#include "balancer/types.h"
#include "net/parse.h"

/* Prefixes of all services, old and new ones, while they are replaced. */
#define MAX_SOURCE_PREFIXES 65536

/* Keeps the families apart: a prefix of IPv6 such as ::/0 contains the IPv4-mapped addresses by which
 * IPv4 clients are looked up. */
#define SOURCE_IPV4 (1U << 31)

struct source_prefix {
	__u32 length;  /* bits of `service` and of the prefix */
	__u32 service; /* its id, and SOURCE_IPV4 for IPv4 VIPs */
	struct in6_addr address;
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, MAX_SOURCE_PREFIXES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct source_prefix);
	__type(value, __u32);
} source_prefixes SEC(".maps");

/* Whether the client of a flow may reach a service that has source prefixes. Not inlined, because of
 * the size of its stack. */
__noinline int may_reach(const struct flow_key *flow, __u32 service)
{
	struct source_prefix key __attribute__((aligned(8))) = {
		.length = 8 * (sizeof(key.service) + sizeof(key.address)),
		.service = service,
	};

	if (!flow)
		return false;
	if (is_ipv4(&flow->destination))
		key.service |= SOURCE_IPV4;
	copy_address(&key.address, &flow->source);
	return bpf_map_lookup_elem(&source_prefixes, &key) != NULL;
}

#endif
