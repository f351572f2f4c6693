/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Counts the open connections of each service, as a load for accept policies, and keeps the cookies
 * of connections (cookie.h). User space checks the counts (internal/agent/audit.go). The kernel
 * calls this program for sockets of all network namespaces in the control group. Only those of the
 * agent's own namespace are followed.
 */
#ifndef SEGUE_AGENT_CONNECTIONS_H
#define SEGUE_AGENT_CONNECTIONS_H

#include "cookie.h"
#include "service.h"

/* The number by which the kernel names the agent's network namespace (its "cookie"). */
volatile __u64 node_netns;

#define IPV6_FAMILY 10 /* AF_INET6 */

/* The address and port of this host. If an IPv6 socket has an IPv4 client, its addresses have the
 * IPv4-mapped form, as IPv4 addresses have in the tables. */
static __always_inline void local_end(const struct bpf_sock_ops *ops, struct in6_addr *address,
				      __be16 *port)
{
	/* This is read even if it is not needed. Otherwise the compiler would merge the reads of
	 * both branches, and the verifier requires plain accesses. */
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
	*port = bpf_htons(bpf_ntohl(ops->remote_port)); /* in network order, unlike local_port */
}

/*
 * The mark of a socket that counts as an open connection. A socket counts from when it gets the
 * mark until it loses it. So it counts at most once, even if another program makes the kernel call
 * this one for sockets that this one has not seen begin. User space compares the counts with the
 * marks.
 */
struct counted_socket {
	struct service_key service; /* the service for which it counts */
	__u8 half;		    /* the half of the count to which it was added */
	__u8 pad[3];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct counted_socket);
} counted_sockets SEC(".maps");

/* The half of the counts to which new connections are added. User space changes it now and then. */
volatile __u32 growing_half;

/* Finds the count of a socket's service, and sets `key` to the key of the count. Port 0 is that of
 * a service with all ports. NULL: the socket is of no service. */
static __always_inline struct connection_count *find_count(const struct bpf_sock_ops *ops,
							   struct service_key *key)
{
	struct connection_count *count;

	key->protocol = IPPROTO_TCP;
	local_end(ops, &key->vip, &key->port);
	if (!to_first_key(key)) {
		/* Other VIPs and ports come first, because services that were removed keep counts. */
		count = bpf_map_lookup_elem(&connections, key);
		if (count)
			return count;
		key->port = 0;
		to_first_key(key);
	}
	return bpf_map_lookup_elem(&connections, key);
}

/* Whether the server has not closed the connection yet. The client may have closed its side. A
 * connection by TCP Fast Open exists from its SYN on, while its state is SYN_RECV (RFC 7413 section
 * 4.2.2). */
static __always_inline bool is_open(__u32 state)
{
	return state == BPF_TCP_SYN_RECV || state == BPF_TCP_ESTABLISHED ||
	       state == BPF_TCP_CLOSE_WAIT;
}

/* Asks for later calls, when the socket's state changes. */
static __always_inline void follow_states(struct bpf_sock_ops *ops)
{
	bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
}

/* Finds the flow of a socket in the flow table. */
static __always_inline void find_flow_of(const struct bpf_sock_ops *ops, struct local_flow *flow)
{
	struct flow_key key = { .protocol = IPPROTO_TCP };

	remote_end(ops, &key.source, &key.source_port);
	local_end(ops, &key.destination, &key.destination_port);
	find_agent_flow(&key, flow);
}

/* Moves the cookie of a new connection from the flow table to its socket. */
static __always_inline void keep_cookie(struct bpf_sock_ops *ops)
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
	if (bpf_sk_storage_get(&socket_cookies, socket, &cookie, BPF_SK_STORAGE_GET_F_CREATE))
		follow_states(ops);
}

/* Adds n to one of the two halves of a count. */
static __always_inline void add_open(struct connection_count *count, __u32 half, __s64 n)
{
	barrier_var(half); /* otherwise the compiler omits the mask, and the verifier refuses */
	__sync_fetch_and_add(&count->open[half & 1], n);
}

/* Counts a new connection. The kernel tells of each connection once. */
static __always_inline void count_open(struct bpf_sock_ops *ops)
{
	struct counted_socket mark = { .half = growing_half & 1 };
	struct connection_count *count = find_count(ops, &mark.service);
	struct bpf_sock *socket = ops->sk;

	if (!count || !socket ||
	    !bpf_sk_storage_get(&counted_sockets, socket, &mark, BPF_SK_STORAGE_GET_F_CREATE))
		return;
	add_open(count, mark.half, 1);
	follow_states(ops);
}

/* Stops counting a connection when the server closes its side, or the connection is reset. */
static __always_inline void count_end(struct bpf_sock_ops *ops)
{
	struct bpf_sock *socket = ops->sk;
	const struct counted_socket *mark;
	struct connection_count *count;
	__u32 half;

	if (!socket || is_open(ops->args[1]))
		return;
	mark = bpf_sk_storage_get(&counted_sockets, socket, NULL, 0);
	if (!mark)
		return;
	half = mark->half;
	count = bpf_map_lookup_elem(&connections, &mark->service);
	bpf_sk_storage_delete(&counted_sockets, socket);
	if (count)
		add_open(count, half, -1);
}

/* Counts a new connection, and moves its cookie to the socket. */
static __always_inline void begin_connection(struct bpf_sock_ops *ops)
{
	count_open(ops);
	if (are_cookies_used())
		keep_cookie(ops);
}

/* The cookie of a socket; NULL: there is none. */
static __always_inline const struct socket_cookie *kept_cookie(struct bpf_sock_ops *ops)
{
	struct bpf_sock *socket = ops->sk;

	if (!socket || !are_cookies_used())
		return NULL;
	return bpf_sk_storage_get(&socket_cookies, socket, NULL, 0);
}

/* Follows a change of a connection's state. A connection in TIME_WAIT has no socket that can keep
 * the cookie. So the cookie then moves to the flow table. The kernel tells of TIME_WAIT as a change
 * to CLOSE. */
static __always_inline void follow_connection(struct bpf_sock_ops *ops)
{
	const struct socket_cookie *cookie = kept_cookie(ops);
	__u32 before = ops->args[0], now = ops->args[1];

	count_end(ops);
	if (cookie && now == BPF_TCP_CLOSE &&
	    (before == BPF_TCP_FIN_WAIT2 || before == BPF_TCP_CLOSING)) {
		struct local_flow flow;

		find_flow_of(ops, &flow);
		put_cookie(&flow.place, cookie, true);
	}
}

/* A correction of a count, which user space passes in place of a frame. */
struct count_correction {
	struct service_key service;
	__u32 half;
	__s64 add;
	__s64 add_unseen;
};

/* Corrects a count. Only a program can add to a count while connections come and go. */
static __always_inline void correct_count(const struct count_correction *correction)
{
	struct service_key key = correction->service;
	struct connection_count *count = bpf_map_lookup_elem(&connections, &key);
	__s64 add = correction->add;

	if (!count)
		return;
	add_open(count, correction->half, add);
	__sync_fetch_and_add(&count->unseen, correction->add_unseen);
	__sync_fetch_and_add(&count->corrected, add < 0 ? -add : add);
}

#endif
