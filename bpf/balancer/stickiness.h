/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What servers say of flows that hunt: create-stickiness, that the sender has taken
 * the flow, and remove-stickiness, that it is ending. They say it with packets to the
 * client, which the balancer unwraps and sends on. The states are those of 6LB, table
 * II; docs/protocol.md has them all.
 */
#ifndef SEGUE_BALANCER_STICKINESS_H
#define SEGUE_BALANCER_STICKINESS_H

#include "hunt.h"
#include "pending.h"
#include "persist.h"
#include "reset.h"
#include "net/tag.h"
#include "unwrap.h"

/* Which slot a server of a service has. The service is part of the key, for one host
 * may serve many. */
struct sender {
	__u64 locator; /* in memory order */
	__u32 service;
	__u32 pad;
};

#define MAX_SENDERS 131072
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SENDERS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sender);
	__type(value, __u32);
} senders SEC(".maps");

/* What is known of a flow here, in either table. */
struct known {
	struct flow_slot flow;
	struct flow_slot half;
};

/* The server that sent the signal, if it is one of the service. */
static __always_inline const struct server *
find_sender(const struct signal *signal, const struct service *service, __u32 *number)
{
	const struct sender key = { .locator = signal->sender, .service = service->id };
	const __u32 *slot = bpf_map_lookup_elem(&senders, &key);
	const struct server *server;

	if (!slot)
		return NULL;
	*number = *slot;
	server = server_at(*number);
	return serves(server, service) ? server : NULL;
}

/* Whether the sender has a key of this node's; anybody has if there is none. Not inlined,
 * for the stack's sake. */
__noinline int is_vouched(const struct packet *pkt, const struct signal *signal)
{
	const struct signal_keys *keys = find_signal_keys();
	struct tagged tagged_signal;
	__u64 tag;

	if (!pkt || !signal)
		return false;
	if (!keys)
		return true;
	tagged_signal = tagged(&pkt->key, signal->sender, sid_low_function(signal->sid_low));
	tag = sid_low_argument(signal->sid_low);
	return tag == make_tag(&tagged_signal, &keys->key[0]) ||
	       tag == make_tag(&tagged_signal, &keys->key[1]);
}

/*
 * Whether an entry's server has the flow, so that no other can: it is a server of the
 * service, and a SYN would still be sent to it (keeps_server), or the signal is not an
 * answer to one. What is over may begin again elsewhere, and what is closing be gone; but
 * its own server's signals may have overtaken one another. What is stale is what servers
 * were asked about.
 */
static __always_inline bool is_taken(const struct packet *pkt, const struct service *service,
				     const struct flow_slot *slot, __u32 sender)
{
	__u32 number = flow_server(slot->value);
	const struct server *server;

	if (!flow_known(slot) || is_stale(service, slot->value, flow_now()))
		return false;
	server = server_at(number);
	if (!serves(server, service))
		return false;
	if (!(pkt->tcp_flags & TCP_SYN))
		return flow_state(slot->value) != FLOW_CLOSING ||
		       (number == sender && !is_over(slot->value));
	return takes_flows(server) && !is_over(slot->value);
}

/* A SYN-ACK's server is half open until the client answers. Its answer to another one may have
 * come since the flow table was looked at: entries are there before they are gone from here. */
static __always_inline int note_half_open(struct known *known, __u32 server)
{
	int first = pending_insert(&known->half, server);

	if (first == PENDING_NOBODY)
		return first;
	flow_search(&known->flow);
	if (first != server || !flow_known(&known->flow))
		return first;
	pending_remove(&known->half);
	return PENDING_NOBODY;
}

/*
 * Notes the server that took a flow, and returns the one that has it then. What is no
 * SYN-ACK comes from a connection. A flow that had an entry keeps its place, half open
 * or not.
 */
static __always_inline int note(const struct packet *pkt, struct known *known, __u32 server)
{
	bool is_answer = pkt->tcp_flags & TCP_SYN;

	if (is_answer && !flow_known(&known->flow))
		return note_half_open(known, server);
	if (!flow_insert(&known->flow, server, is_answer ? FLOW_NEW : FLOW_ESTABLISHED, flow_now()))
		return PENDING_NOBODY;
	if (flow_known(&known->half))
		pending_remove(&known->half);
	return server;
}

static __always_inline void recollect(const struct packet *pkt, const struct service *service,
				      struct known *known)
{
	flow_lookup(&pkt->key, service->id, &known->flow);
	pending_lookup(&known->flow, &known->half);
}

static __always_inline enum lb_reason create_result(int server, __u32 sender)
{
	return server == sender ? LB_RETURN_CREATE : LB_FORWARD_RESET;
}

/*
 * create-stickiness: the first server keeps the flow; the reason is that of a reset
 * where the sender is another. Where it cannot be noted another core may have been
 * faster: one more look tells.
 */
static __always_inline enum lb_reason
create(const struct packet *pkt, const struct service *service, struct known *known, __u32 sender)
{
	for (int i = 0; i < 2; i++) {
		struct flow_slot *slot = &known->flow;
		int server;

		recollect(pkt, service, known);
		if (!flow_known(slot))
			slot = &known->half;
		if (is_taken(pkt, service, slot, sender))
			return create_result(flow_server(slot->value), sender);
		server = note(pkt, known, sender);
		if (server != PENDING_NOBODY)
			return create_result(server, sender);
	}
	return LB_RETURN_NO_ROOM;
}

/* remove-stickiness: of the flow's own server it begins the end; others know nothing. */
static __always_inline enum lb_reason
remove(const struct packet *pkt, const struct service *service, struct known *known, __u32 sender)
{
	recollect(pkt, service, known);
	if (flow_known(&known->flow)) {
		if (flow_server(known->flow.value) == sender)
			flow_touch(&known->flow, FLOW_CLOSING, flow_now());
	} else if (flow_known(&known->half) && flow_server(known->half.value) == sender) {
		pending_remove(&known->half);
	}
	return LB_RETURN_REMOVE;
}

/* Whether it says that the flow ends. */
static __always_inline bool is_removal(const struct signal *signal)
{
	return sid_low_function(signal->sid_low) == SID_REMOVE;
}

/* Does what a signal says. `label` becomes the flow's. */
static __always_inline enum lb_reason obey(const struct packet *pkt, const struct service *service,
					   const struct signal *signal, __u32 sender, __u32 *label)
{
	struct known known = {};
	enum lb_reason why = is_removal(signal) ? remove(pkt, service, &known, sender)
						: create(pkt, service, &known, sender);

	*label = flow_label(&known.flow);
	return why;
}

/* Turns the server's packet into a reset, and sends it back. */
static __always_inline int send_reset(struct xdp_md *ctx, struct packet *pkt,
				      const struct service *service, const struct signal *signal,
				      __u32 sender, __u32 label)
{
	struct segments segments = {
		.count = 1,
		.server = { sender },
		.first_server = server_at(sender),
	};

	if (!make_reset(ctx, pkt, signal))
		return leave(ctx, pkt, LB_DROP_SIGNAL);
	ask(&segments, SID_DELIVER, SID_DELIVER);
	return forward(ctx, pkt, service, &segments, 1, label, LB_FORWARD_RESET);
}

/* Takes a server's signal, whose packet goes on to the client. */
static __always_inline int take_signal(struct xdp_md *ctx, struct packet *pkt)
{
	struct service service = {};
	struct signal signal = {};
	__u32 sender = 0, label;
	enum lb_reason why;

	if (!read_signal(ctx, pkt, &signal))
		return leave(ctx, pkt, LB_DROP_SIGNAL);
	if (classify(pkt, &service))
		return leave(ctx, pkt, LB_DROP_SENDER);
	if (!find_sender(&signal, &service, &sender))
		return leave(ctx, pkt, LB_DROP_SENDER);
	if (!is_vouched(pkt, &signal))
		return leave(ctx, pkt, LB_DROP_TAG);
	if (pkt->hop_limit <= 1)
		return leave(ctx, pkt, LB_DROP_HOP_LIMIT);
	count_received_signal(sender, is_removal(&signal));
	if (pkt->tcp_flags & TCP_SYN)
		count_answered_offer(first_offered(&service, &pkt->key));
	why = obey(pkt, &service, &signal, sender, &label);
	if (why == LB_FORWARD_RESET)
		return send_reset(ctx, pkt, &service, &signal, sender, label);
	return leave(ctx, pkt, remove_signal(ctx, pkt, &signal) ? why : LB_DROP_SIGNAL);
}

#endif
