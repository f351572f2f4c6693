/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Lets user space look up sockets with the code that packets use, so that a trace tells what would
 * happen to a packet.
 */
#ifndef SEGUE_AGENT_QUERY_H
#define SEGUE_AGENT_QUERY_H

#include "local.h"

/* User space passes it in place of a frame. */
struct socket_query {
	struct flow_key flow; /* set by user space; the program sets all other fields */
	__u32 kinds;	      /* enum socket_kind, but never SOCKET_COOKIE */
	__u32 state;	      /* BPF_TCP_* of the flow's socket; 0: none */
	struct backlog backlog;
};

static __always_inline void answer_query(struct xdp_md *ctx, struct socket_query *query)
{
	struct packet pkt = { .key = query->flow };
	struct backlog backlog = {};
	struct bpf_sock *socket = find_socket(ctx, &pkt.key, pkt.key.source_port);

	query->state = 0;
	if (socket) {
		query->state = socket->state;
		bpf_sk_release(socket);
	}
	query->kinds = find_local(ctx, &pkt, &backlog);
	query->backlog = backlog;
}

#endif
