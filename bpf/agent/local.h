/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether this server has a flow, as the kernel's own sockets tell. A flood cannot evict sockets,
 * and no socket outlives its connection.
 */
#ifndef SEGUE_AGENT_LOCAL_H
#define SEGUE_AGENT_LOCAL_H

#include "client.h"

/* The fields of the kernel's structures that are read. The loader finds their offsets (CO-RE). */
struct sock {
	__u32 sk_ack_backlog;
	__u32 sk_max_ack_backlog;
} __attribute__((preserve_access_index));

struct inet_sock {
	struct sock sk;
} __attribute__((preserve_access_index));

struct request_sock_queue {
	struct {
		int counter;
	} young;
} __attribute__((preserve_access_index));

struct inet_connection_sock {
	struct inet_sock icsk_inet;
	struct request_sock_queue icsk_accept_queue;
} __attribute__((preserve_access_index));

struct tcp_sock {
	struct inet_connection_sock inet_conn;
} __attribute__((preserve_access_index));

struct tcp_request_sock {
	__u32 snt_isn;
	__u32 snt_tsval_first; /* since Linux 6.15 */
	__u32 snt_tsval_last;
} __attribute__((preserve_access_index));

struct inet_timewait_sock {
	unsigned char tw_substate;
} __attribute__((preserve_access_index));

struct tcp_timewait_sock {
	struct inet_timewait_sock tw_sk;
} __attribute__((preserve_access_index));

/* The sockets that the kernel has for a flow. Several may apply. */
enum socket_kind {
	SOCKET_NONE = 0,
	SOCKET_LISTENING = 1 << 0, /* the application listens */
	SOCKET_REQUEST = 1 << 1,   /* half-open: the SYN was answered */
	SOCKET_CONNECTED = 1 << 2, /* until both sides have closed the connection */
	SOCKET_TIME_WAIT = 1 << 3, /* the connection is over */
	SOCKET_COOKIE = 1 << 4,	   /* the packet returns a valid SYN cookie */
};

/* The connections of a listening socket that the application does not have yet. */
struct backlog {
	__u32 waiting; /* in the accept queue */
	__u32 most;    /* the limit of the accept queue */
	__u32 young;   /* half-open, and the SYN-ACK was sent once: for at most a second */
};

/* Whether the kernel has a connection for the flow. A half-open one counts. */
static __always_inline bool is_live(int kinds)
{
	return kinds & (SOCKET_REQUEST | SOCKET_CONNECTED);
}

/* Writes the ends of a flow as the kernel takes them, and returns their size in bytes. */
static __always_inline __u32 tuple_of(const struct flow_key *key, __be16 source_port,
				      struct bpf_sock_tuple *tuple)
{
	if (is_ipv4(&key->destination)) {
		tuple->ipv4.saddr = key->source.s6_addr32[3];
		tuple->ipv4.daddr = key->destination.s6_addr32[3];
		tuple->ipv4.sport = source_port;
		tuple->ipv4.dport = key->destination_port;
		return sizeof(tuple->ipv4);
	}
	__builtin_memcpy(tuple->ipv6.saddr, &key->source, sizeof(key->source));
	__builtin_memcpy(tuple->ipv6.daddr, &key->destination, sizeof(key->destination));
	tuple->ipv6.sport = source_port;
	tuple->ipv6.dport = key->destination_port;
	return sizeof(tuple->ipv6);
}

/* Finds the socket that gets the packets of a flow. The caller must release it. */
static __always_inline struct bpf_sock *find_socket(void *ctx, const struct flow_key *key,
						    __be16 source_port)
{
	struct bpf_sock_tuple tuple = {};
	__u32 size = tuple_of(key, source_port, &tuple);

	return bpf_skc_lookup_tcp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
}

/* Whether a socket of UDP takes packets of a client. Not inlined: it has a stack of its own. */
__noinline int receives_udp(struct xdp_md *ctx, const struct flow_key *key)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *socket;
	__u32 size;

	if (!key)
		return false;
	size = tuple_of(key, key->source_port, &tuple);
	socket = bpf_sk_lookup_udp(ctx, &tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (!socket)
		return false;
	bpf_sk_release(socket);
	return true;
}

/* Sets the backlog, unless it is NULL. */
static __always_inline void read_backlog(struct bpf_sock *listener, struct backlog *backlog)
{
	struct tcp_sock *tcp = backlog ? bpf_skc_to_tcp_sock(listener) : NULL;

	if (!tcp)
		return;
	backlog->waiting = tcp->inet_conn.icsk_inet.sk.sk_ack_backlog;
	backlog->most = tcp->inet_conn.icsk_inet.sk.sk_max_ack_backlog;
	backlog->young = tcp->inet_conn.icsk_accept_queue.young.counter;
}

/* Whether the application listens. If so, sets the backlog, unless that is NULL. No client has port
 * 0, so the lookup finds only listeners. */
static __always_inline bool is_listening(void *ctx, const struct flow_key *key,
					 struct backlog *backlog)
{
	struct bpf_sock *socket = find_socket(ctx, key, 0);
	bool listening;

	if (!socket)
		return false;
	listening = socket->state == BPF_TCP_LISTEN;
	if (listening)
		read_backlog(socket, backlog);
	bpf_sk_release(socket);
	return listening;
}

/* Whether the packet returns a valid SYN cookie. Under a flood of SYNs the kernel keeps no
 * socket for a half-open connection. */
static __always_inline bool returns_cookie(struct xdp_md *ctx, const struct packet *pkt,
					   struct bpf_sock *listener)
{
	struct ipv6hdr ip = { .version = 6 };
	struct tcphdr tcp;

	if (pkt->kind != PACKET_WHOLE || !(pkt->tcp_flags & TCP_ACK) ||
	    bpf_xdp_load_bytes(ctx, pkt->transport, &tcp, sizeof(tcp)))
		return false;
	if (is_ipv4(&pkt->key.destination)) {
		struct iphdr *ipv4 = (void *)&ip;

		ipv4->version = 4;
		ipv4->ihl = 5;
		ipv4->saddr = pkt->key.source.s6_addr32[3];
		ipv4->daddr = pkt->key.destination.s6_addr32[3];
		return !bpf_tcp_check_syncookie(listener, &ip, sizeof(*ipv4), &tcp, sizeof(tcp));
	}
	ip.saddr = pkt->key.source;
	ip.daddr = pkt->key.destination;
	return !bpf_tcp_check_syncookie(listener, &ip, sizeof(ip), &tcp, sizeof(tcp));
}

/*
 * Reads the sequence number of the SYN-ACK of a half-open connection. bpf_skc_to_tcp_request_sock
 * does not support requests of multipath TCP, though they begin with the same structure. The
 * verifier permits no other access to a socket's fields. So for such a request the program reads
 * the socket's address from the stack, and the field as kernel memory. Kernels in lockdown refuse
 * that.
 */
static __always_inline bool read_sent_isn(struct bpf_sock *socket, __u32 *isn)
{
	struct tcp_request_sock *request = bpf_skc_to_tcp_request_sock(socket);

	if (request) {
		*isn = request->snt_isn;
		return true;
	}
	return !bpf_probe_read_kernel(&request, sizeof(request), &socket) &&
	       !bpf_probe_read_kernel(isn, sizeof(*isn), &request->snt_isn);
}

/*
 * Whether a packet of a half-open connection acknowledges this server's SYN-ACK. It may acknowledge
 * the SYN-ACK of another server that accepted a copy of the SYN. Then the connection belongs to
 * that server, and this server's stack would reset it. True, too, for a packet that does not tell:
 * one without ACK, a fragment, or one whose SYN-ACK cannot be read.
 */
static __always_inline bool is_answer_to(struct xdp_md *ctx, const struct packet *pkt,
					 struct bpf_sock *socket)
{
	struct tcphdr tcp;
	__u32 isn;

	if (pkt->kind != PACKET_WHOLE || !(pkt->tcp_flags & TCP_ACK) ||
	    bpf_xdp_load_bytes(ctx, pkt->transport, &tcp, sizeof(tcp)) ||
	    !read_sent_isn(socket, &isn))
		return true;
	return bpf_ntohl(tcp.ack_seq) == isn + 1;
}

/*
 * Whether the connection of a socket with the state TIME_WAIT is over, except for late packets.
 * Linux also uses such a socket for a connection that the application has closed and the client has
 * not: that connection is not over. Listeners with multipath TCP have sockets of another type,
 * which begin with the same structure: see read_sent_isn().
 */
static __always_inline bool is_over(struct bpf_sock *socket)
{
	struct tcp_timewait_sock *over = bpf_skc_to_tcp_timewait_sock(socket);
	unsigned char state = BPF_TCP_TIME_WAIT;
	__u32 known;

	if (over) {
		known = over->tw_sk.tw_substate;
		/* Otherwise the compiler merges both reads, and the verifier refuses. */
		barrier_var(known);
		return known == BPF_TCP_TIME_WAIT;
	}
	if (!bpf_probe_read_kernel(&over, sizeof(over), &socket))
		bpf_probe_read_kernel(&state, sizeof(state), &over->tw_sk.tw_substate);
	return state == BPF_TCP_TIME_WAIT;
}

/*
 * Returns the kinds of sockets (enum socket_kind) of the packet's flow. A half-open connection does
 * not count if the packet acknowledges the SYN-ACK of another server. If there is a listener, it
 * sets the backlog, unless that is NULL. Not inlined: the verifier walks it once.
 */
__noinline int find_socket_kinds(struct xdp_md *ctx, const struct packet *pkt,
				 struct backlog *backlog)
{
	struct bpf_sock *socket;
	int kinds;

	if (!pkt)
		return SOCKET_NONE;
	socket = find_socket(ctx, &pkt->key, pkt->key.source_port);
	if (!socket)
		return SOCKET_NONE;
	switch (socket->state) {
	case BPF_TCP_LISTEN:
		kinds = SOCKET_LISTENING;
		read_backlog(socket, backlog);
		if (returns_cookie(ctx, pkt, socket))
			kinds |= SOCKET_COOKIE;
		break;
	case BPF_TCP_NEW_SYN_RECV:
		kinds = is_answer_to(ctx, pkt, socket) ? SOCKET_REQUEST : SOCKET_NONE;
		break;
	case BPF_TCP_SYN_RECV:
		kinds = SOCKET_REQUEST;
		break;
	case BPF_TCP_TIME_WAIT:
		kinds = is_over(socket) ? SOCKET_TIME_WAIT : SOCKET_CONNECTED;
		break;
	default:
		kinds = SOCKET_CONNECTED;
	}
	bpf_sk_release(socket);
	if (kinds == SOCKET_TIME_WAIT && is_listening(ctx, &pkt->key, backlog))
		kinds |= SOCKET_LISTENING;
	return kinds;
}

#endif
