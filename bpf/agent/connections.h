/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counts the open connections of each service, which accept policies use as the load, and keeps the
 * cookies of connections (cookie.h). The kernel calls this program for sockets of all network
 * namespaces in the control group. Only those of the agent's own namespace are followed.
 */
#ifndef SEGUE_AGENT_CONNECTIONS_H
#define SEGUE_AGENT_CONNECTIONS_H

#include "cookie.h"
#include "service.h"

/* The cookie of the agent's network namespace. */
volatile __u64 node_netns;

#define IPV6_FAMILY 10 /* AF_INET6 */

/* The address and port of this host. An IPv4 client of an IPv6 socket has an IPv4-mapped address,
 * which is the form of IPv4 addresses in the tables. */
static __always_inline void local_end(const struct bpf_sock_ops *ops, struct in6_addr *address,
				      __be16 *port)
{
	/* Both are read before one is chosen: the verifier requires plain accesses, and the
	 * compiler would merge the two reads. */
	__u32 ipv4 = ((const volatile struct bpf_sock_ops *)ops)->local_ip4;

	if (ops->family == IPV6_FAMILY) {
		address->s6_addr32[0] = ops->local_ip6[0];
		address->s6_addr32[1] = ops->local_ip6[1];
		address->s6_addr32[2] = ops->local_ip6[2];
		address->s6_addr32[3] = ops->local_ip6[3];
	} else {
		map_ipv4(address, ipv4);
	}
	*port = bpf_htons(ops->local_port);
}

/* The address and port of the client: see local_end(). */
static __always_inline void remote_end(const struct bpf_sock_ops *ops, struct in6_addr *address,
				       __be16 *port)
{
	__u32 ipv4 = ((const volatile struct bpf_sock_ops *)ops)->remote_ip4;

	if (ops->family == IPV6_FAMILY) {
		address->s6_addr32[0] = ops->remote_ip6[0];
		address->s6_addr32[1] = ops->remote_ip6[1];
		address->s6_addr32[2] = ops->remote_ip6[2];
		address->s6_addr32[3] = ops->remote_ip6[3];
	} else {
		map_ipv4(address, ipv4);
	}
	*port = bpf_htons(bpf_ntohl(ops->remote_port)); /* unlike local_port */
}

static __always_inline __s64 *connections_of(const struct bpf_sock_ops *ops)
{
	struct service_key key = { .protocol = IPPROTO_TCP };
	__s64 *count;

	local_end(ops, &key.vip, &key.port);
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

/* Asks for later calls, when the socket's state changes. */
static __always_inline void follow_states(struct bpf_sock_ops *ops)
{
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
}

/* The flow table's place for the flow of a socket. */
static __always_inline void find_flow_of(const struct bpf_sock_ops *ops, struct local_flow *flow)
{
	struct flow_key key = { .protocol = IPPROTO_TCP };

	remote_end(ops, &key.source, &key.source_port);
	local_end(ops, &key.destination, &key.destination_port);
	find_agent_flow(&key, flow);
}

/* Moves the cookie of a new connection from the flow table to its socket. */
static __always_inline void keep_cookie(struct bpf_sock_ops *ops, bool is_counted)
{
	struct bpf_sock *socket = ops->sk;
	struct socket_cookie cookie;
	struct local_flow flow;

	if (!socket)
		return;
	find_flow_of(ops, &flow);
	if (flow.entry.state != AGENT_FLOW_COOKIE)
		return;
	cookie = cookie_in(&flow.entry);
	cookie.is_uncounted = !is_counted;
	if (bpf_sk_storage_get(&socket_cookies, socket, &cookie, BPF_SK_STORAGE_GET_F_CREATE))
		follow_states(ops);
}

static __always_inline void begin_connection(struct bpf_sock_ops *ops)
{
	__s64 *count = connections_of(ops);

	if (count) {
		__sync_fetch_and_add(count, 1);
		follow_states(ops);
	}
	if (are_cookies_used())
		keep_cookie(ops, count);
}

/* The cookie of a socket; NULL: there is none. */
static __always_inline const struct socket_cookie *kept_cookie(struct bpf_sock_ops *ops)
{
	struct bpf_sock *socket = ops->sk;

	if (!socket || !are_cookies_used())
		return NULL;
	return bpf_sk_storage_get(&socket_cookies, socket, NULL, 0);
}

/* Follows a change of a connection's state. In TIME_WAIT there is no socket to keep the cookie. */
static __always_inline void follow_connection(struct bpf_sock_ops *ops)
{
	const struct socket_cookie *cookie = kept_cookie(ops);
	__u32 before = ops->args[0], now = ops->args[1];

	if (is_open(before) && !is_open(now) && !(cookie && cookie->is_uncounted)) {
		__s64 *count = connections_of(ops);

		if (count)
			__sync_fetch_and_add(count, -1);
	}
	if (cookie && now == BPF_TCP_CLOSE &&
	    (before == BPF_TCP_FIN_WAIT2 || before == BPF_TCP_CLOSING)) {
		struct local_flow flow;

		find_flow_of(ops, &flow);
		put_cookie(&flow.place, cookie, true);
	}
}

#endif
