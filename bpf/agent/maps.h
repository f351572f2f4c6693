/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The agent's tables. User space writes all of them.
 */
#ifndef SEGUE_AGENT_MAPS_H
#define SEGUE_AGENT_MAPS_H

#include "net/hash.h"
#include "net/types.h"

#define MAX_AGENT_SERVICES 65536

/* The VIPs that this server serves. The value is 1 while the VIP is an address of this host,
 * else 0. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, __u32);
} vips SEC(".maps");

/*
 * The VIPs once more, in cache lines that programs read without a call. Nearly all packets find
 * their VIP here. A VIP whose line is full is only in `vips`. User space writes both.
 */
#define VIP_LINE_BITS 8
#define VIPS_PER_LINE 4

struct vip_line {
	struct in6_addr vip[VIPS_PER_LINE]; /* 0: free */
};

volatile struct vip_line vip_lines[1 << VIP_LINE_BITS] SEC(".data.vips");

/* Whether the address is in vip_lines. No client chooses VIPs, so a simple hash will do. */
static __always_inline bool is_in_vip_lines(const struct in6_addr *address)
{
	const __u64 *words = (const __u64 *)address;
	const volatile struct vip_line *line =
		&vip_lines[spread(words[0] ^ words[1]) >> (64 - VIP_LINE_BITS)];

#pragma unroll
	for (int i = 0; i < VIPS_PER_LINE; i++) {
		const volatile __u64 *vip = (const volatile __u64 *)&line->vip[i];

		if (vip[1] == words[1] && vip[0] == words[0])
			return words[0] | words[1]; /* address 0 has matched a free place */
	}
	return false;
}

/* Whether only the nodes in `balancers` may send functions about flows. If not, any node may. */
volatile __u32 balancers_are_named;

/* A prefix of locators, of up to 64 bits. */
struct locator_prefix {
	__u32 length; /* in bits */
	__u8 locator[8];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 2 * 1024); /* old and new ones, while they are replaced */
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct locator_prefix);
	__type(value, __u32);
} balancers SEC(".maps");

/* This node's addresses as the end of gre and ipip tunnels. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, __u32);
} tunnel_addresses SEC(".maps");

struct service_key {
	struct in6_addr vip;
	__be16 port; /* 0: every port that no other service of the VIP names */
	__u8 protocol;
	__u8 pad;
};

/*
 * The keys of services with several VIPs or ports: for each key by which packets find such a
 * service, the key of its first VIP and port, under which other tables have the service.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct service_key);
} first_keys SEC(".maps");

/* Whether there are such services. If not, programs do not search for them. */
volatile __u32 has_first_keys;

/* Replaces the key of a service with several VIPs or ports by that of its first VIP and port. False
 * if no such service has the key, which then does not change. */
static __always_inline bool to_first_key(struct service_key *key)
{
	const struct service_key *first;

	if (!has_first_keys)
		return false;
	first = bpf_map_lookup_elem(&first_keys, key);
	if (!first)
		return false;
	*key = *first;
	return true;
}

/* The largest MSS that fits the path from the balancers, by TCP service. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, __u32);
} segment_sizes SEC(".maps");

struct service_label {
	__u8 name[NAME_SIZE]; /* zero-terminated */
};

/* Names of services, for user space; no program reads it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct service_label);
} service_names SEC(".maps");

/*
 * The addresses that the agent has added to the host, with the indexes of their interfaces. They
 * are kept so that the agent can remove them after any number of restarts; no program reads them.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, __u32);
} belongings SEC(".maps");

#endif
