/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Tells user space what the agent knows about a flow, by the same code that handles packets.
 */
#ifndef SEGUE_AGENT_QUERY_H
#define SEGUE_AGENT_QUERY_H

#include "decision.h"
#include "flows.h"
#include "local.h"
#include "service.h"

/* A question about the sockets of a flow. User space passes it in place of a frame. */
struct socket_query {
	struct flow_key flow; /* set by user space; the program sets all other fields */
	__u32 kinds;	      /* enum socket_kind, but never SOCKET_COOKIE */
	__u32 state;	      /* BPF_TCP_* of the flow's socket; 0: none */
	struct backlog backlog;
};

/* Returns the state (BPF_TCP_*) of the socket that gets the flow's packets. A socket of UDP listens.
 * Returns 0 if there is no such socket. Where Linux has TIME_WAIT for a connection that is not over
 * (is_over), it returns FIN_WAIT2. */
static __always_inline __u32 socket_state(struct xdp_md *ctx, const struct flow_key *key)
{
	struct bpf_sock *socket;
	__u32 state;

	if (key->protocol == IPPROTO_UDP)
		return receives_udp(ctx, key) ? BPF_TCP_LISTEN : 0;
	socket = find_socket(ctx, key, key->source_port);
	if (!socket)
		return 0;
	state = socket->state;
	if (state == BPF_TCP_TIME_WAIT && !is_over(socket))
		state = BPF_TCP_FIN_WAIT2;
	bpf_sk_release(socket);
	return state;
}

/* Answers a query. A socket of UDP counts as one that listens. */
static __always_inline void answer_query(struct xdp_md *ctx, struct socket_query *query)
{
	struct packet pkt = { .key = query->flow };
	struct backlog backlog = {};

	if (pkt.key.protocol == IPPROTO_UDP) {
		query->kinds = receives_udp(ctx, &pkt.key) ? SOCKET_LISTENING : SOCKET_NONE;
		return;
	}
	query->state = socket_state(ctx, &pkt.key);
	query->kinds = find_socket_kinds(ctx, &pkt, &backlog);
	query->backlog = backlog;
}

/* The packet that a dry run records. On the stack it would be too large. */
static struct client_packet recorded SEC(".data.decision");

/* Records the socket of the recorded packet. Returns 0. */
__noinline int record_socket(struct xdp_md *ctx)
{
	record.socket = socket_state(ctx, &recorded.packet.key);
	return 0;
}

/* Records what the agent knows about the flow of a packet, in a dry run. False if the packet has no
 * flow. Like record_socket, it is not inlined: no other run needs its stack. */
__noinline int record_flow(struct xdp_md *ctx, const struct envelope *envelope)
{
	const struct flow_key *key = &recorded.packet.key;
	struct local_flow flow;

	recorded = (struct client_packet){};
	if (!envelope || !read_client(ctx, envelope, &recorded) || recorded.fragment.is_later)
		return false;
	record.has_flow = true;
	if (!find_acceptance(key, &record.service))
		record.service.protocol = 0;
	find_agent_flow(key, &flow);
	if (!is_entered(&flow))
		return true;
	record.flow_state = flow.entry.state;
	record.balancer = flow.entry.balancer;
	record.age = agent_flow_age(&flow.entry);
	return true;
}

#endif
