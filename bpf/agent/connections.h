/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counts the open connections of each service, which accept policies use as the load. The kernel
 * calls this program for sockets of all network namespaces in the control group. Sockets of the
 * agent's own namespace count.
 */
#ifndef SEGUE_AGENT_CONNECTIONS_H
#define SEGUE_AGENT_CONNECTIONS_H

#include "service.h"

/* The cookie of the agent's network namespace. */
volatile __u64 node_netns;

#define IPV6_FAMILY 10 /* AF_INET6 */

static __always_inline __s64 *connections_of(const struct bpf_sock_ops *ops)
{
	struct service_key key = { .protocol = IPPROTO_TCP };
	/* Both are read before one is chosen: the verifier requires plain accesses, and the
	 * compiler would merge the two reads. */
	__u32 ipv4 = ((const volatile struct bpf_sock_ops *)ops)->local_ip4;
	__s64 *count;

	if (ops->family == IPV6_FAMILY) {
		key.vip.s6_addr32[0] = ops->local_ip6[0];
		key.vip.s6_addr32[1] = ops->local_ip6[1];
		key.vip.s6_addr32[2] = ops->local_ip6[2];
		key.vip.s6_addr32[3] = ops->local_ip6[3];
	} else {
		map_ipv4(&key.vip, ipv4);
	}
	key.port = bpf_htons(ops->local_port);
	count = bpf_map_lookup_elem(&connections, &key);
	if (count)
		return count;
	key.port = 0;
	return bpf_map_lookup_elem(&connections, &key);
}

/* Whether the server has not closed the connection yet. The client may have. */
static __always_inline bool is_open(__u32 state)
{
	return state == BPF_TCP_ESTABLISHED || state == BPF_TCP_CLOSE_WAIT;
}

static __always_inline void follow_connection(struct bpf_sock_ops *ops)
{
	__s64 *count;

	if (bpf_get_netns_cookie(ops) != node_netns)
		return;
	count = connections_of(ops);
	if (!count)
		return;
	if (ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		__sync_fetch_and_add(count, 1);
		bpf_sock_ops_cb_flags_set(ops,
					  ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
	} else {
		__sync_fetch_and_add(count, -1);
	}
}

#endif
