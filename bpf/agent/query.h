/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What user space asks of the kernel's sockets: the same as packets do, by the same way,
 * so that what it tells of a flow is what becomes of the flow.
 */
#ifndef SEGUE_AGENT_QUERY_H
#define SEGUE_AGENT_QUERY_H

#include "local.h"

/* In the place of a frame. */
struct socket_query {
	struct flow_key flow; /* of the question, as are all others of the answer */
	__u32 kinds;	      /* enum socket_kind; of cookies nothing is known */
	__u32 state;	      /* BPF_TCP_*, of the socket that packets of the flow meet; 0: none */
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
