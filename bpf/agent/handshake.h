/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Handles packets of TCP from the balancer whose SIDs have functions about flows: the left half of
 * 6LB's table III. signal.h is the right half.
 */
#ifndef SEGUE_AGENT_HANDSHAKE_H
#define SEGUE_AGENT_HANDSHAKE_H

#include "accept.h"
#include "flows.h"
#include "client.h"
#include "echo.h"
#include "least.h"
#include "listener.h"
#include "local.h"
#include "next_segment.h"
#include "net/token.h"

/* Whether the flow is half-open, and has a cookie, which no socket has yet. Packets without a
 * cookie then leave the entry as it is, because anybody can send them. */
static __always_inline bool keeps_cookie(const struct local_flow *flow, int kinds)
{
	return kinds & SOCKET_REQUEST && flow->entry.state == AGENT_FLOW_COOKIE;
}

/*
 * Handles a SYN of a connection that this server has. The stack decides what the SYN means. This
 * function changes only the flow's entry. If the balancer asks for a cookie, a half-open flow is
 * entered with the cookie, and any other entry stays as it is. If the balancer asks for none:
 *
 *	- The entry of a half-open flow with a cookie stays as it is.
 *	- Any other half-open flow waits, and so does a flow that waited before: the server's next
 *	  packet signals it to the balancer.
 *	- A connected flow without an entry gets one, without a signal.
 */
static __always_inline void handle_repeated_syn(const struct local_flow *flow,
						const struct envelope *envelope, int kinds)
{
	if (cookie_width_of_sid(envelope->sid_low)) {
		/* The cookie of a connected flow is in its socket. */
		if (kinds & SOCKET_REQUEST)
			accept_with_cookie(flow, envelope);
		return;
	}
	if (keeps_cookie(flow, kinds))
		return;
	if (kinds & SOCKET_REQUEST || flow->entry.state == AGENT_FLOW_WAIT)
		update_agent_flow(flow, envelope, AGENT_FLOW_WAIT);
	else if (!is_entered(flow))
		update_agent_flow(flow, envelope, AGENT_FLOW_DIRECT);
}

/* Whether this server has accepted the same SYN before, although no socket has the connection: the
 * socket does not exist yet, or the SYN-ACK had a SYN cookie. No client repeats its SYN
 * for longer than REPEAT_LIFETIME. */
static __always_inline bool was_accepted(const struct local_flow *flow, int kinds)
{
	return kinds == SOCKET_LISTENING &&
	       (flow->entry.state == AGENT_FLOW_WAIT ||
		(flow->entry.state == AGENT_FLOW_COOKIE && !flow->entry.told)) &&
	       agent_flow_age(&flow->entry) <= REPEAT_LIFETIME;
}

/* Whether the server compares its load with those of other candidates. The last one does so under
 * any policy if no application listens: then any load is lower than its own. */
static __always_inline bool must_compare(const struct envelope *envelope,
					 const struct acceptance *acceptance, bool listens)
{
	return acceptance->policy == ACCEPT_LEAST || acceptance->policy == ACCEPT_DRAINED ||
	       (!listens && is_last_server(envelope));
}

/* Decides about a new connection of a service with an accept policy. */
static __always_inline enum offer answer_offer(struct xdp_md *ctx, const struct envelope *envelope,
					       const struct packet *pkt,
					       struct acceptance *acceptance,
					       const struct service_key *key, int kinds,
					       const struct backlog *backlog)
{
	bool listens = kinds & SOCKET_LISTENING;
	struct known_load own = {};
	enum offer result;

	/* Only a candidate that hands a connection back leaves a load in the SID (least.h). */
	if (function_of(envelope) == SID_CONNECT_FORCE)
		return load_of_sid(envelope->sid_low).next ? OFFER_TAKEN_BACK : OFFER_FORCED;
	if (listens && !is_last_server(envelope) && cannot_carry_column(ctx, envelope, pkt))
		return OFFER_REFUSED;
	if (!listens && !dry_run)
		set_refused(&pkt->key);
	if (must_compare(envelope, acceptance, listens))
		result = decide_least(ctx, envelope, acceptance, key, listens, backlog, &own);
	else if (is_last_server(envelope))
		result = OFFER_FORCED;
	else
		result =
			listens ? decide_offer(acceptance, key, backlog, &own) : OFFER_REFUSED_DOWN;
	/* This server tells its load even if it compares none: a later candidate may. */
	if (result == OFFER_REFUSED && own.next)
		show_load(ctx, envelope, own);
	return result;
}

/* Decides about a new connection. The reason is none if this server accepts it. A packet of no
 * configured service meets no policy: then only the last server accepts. Not inlined: it has a
 * stack of its own. */
__noinline int take_connection(struct xdp_md *ctx, const struct envelope *envelope,
			       const struct packet *pkt, int kinds, const struct backlog *backlog)
{
	struct service_key key __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	struct acceptance *acceptance;
	enum offer result;

	if (!envelope || !pkt || !backlog)
		return AGENT_DROP_TRANSPORT;
	acceptance = find_acceptance(&pkt->key, &key);
	if (!acceptance)
		return function_of(envelope) == SID_CONNECT_FORCE || is_last_server(envelope)
			       ? AGENT_NONE
			       : AGENT_NEXT_REFUSED;
	result = answer_offer(ctx, envelope, pkt, acceptance, &key, kinds, backlog);
	count_offer(acceptance, result);
	if (result == OFFER_RETURNED)
		return AGENT_NEXT_RETURNED;
	return result == OFFER_REFUSED || result == OFFER_REFUSED_DOWN ? AGENT_NEXT_REFUSED
								       : AGENT_NONE;
}

/* Enters the flow of a connection that this server accepts. If the balancer takes load reports, the
 * entry has what a report says about the first candidate. */
static __always_inline void enter_accepted(struct xdp_md *ctx, const struct envelope *envelope,
					   const struct local_flow *flow)
{
	struct agent_flow accepted;

	if (cookie_width_of_sid(envelope->sid_low)) {
		accept_with_cookie(flow, envelope);
		return;
	}
	accepted = agent_flow_of(&flow->entry, envelope, AGENT_FLOW_WAIT);
	if (accepted.wants_report)
		accepted.first = first_candidate(ctx, envelope);
	agent_flow_put(&flow->place, &accepted);
}

/* Handles connect-avail and connect-force. */
static __always_inline enum agent_reason
handle_connect(struct xdp_md *ctx, const struct envelope *envelope, const struct packet *pkt)
{
	struct backlog backlog = {};
	struct local_flow flow;
	enum agent_reason why;
	int kinds;

	/* This comes first, so that the entry's cache line is loaded during the search for
	 * sockets. */
	find_agent_flow(&pkt->key, &flow);
	kinds = find_socket_kinds(ctx, pkt, &backlog);
	if (is_live(kinds)) {
		handle_repeated_syn(&flow, envelope, kinds);
		return AGENT_NONE;
	}
	if (!was_accepted(&flow, kinds)) {
		why = take_connection(ctx, envelope, pkt, kinds, &backlog);
		if (why)
			return why;
	}
	enter_accepted(ctx, envelope, &flow);
	return AGENT_NONE;
}

/* The state of a flow after a packet. A flow that is ending stays so. A packet with FIN or RST
 * makes any other flow closing. After any other packet, the state is `otherwise`. */
static __always_inline enum agent_flow_state next_agent_state(const struct packet *pkt,
							      const struct local_flow *flow,
							      enum agent_flow_state otherwise)
{
	if (flow->entry.state == AGENT_FLOW_ENDING)
		return AGENT_FLOW_ENDING;
	return ends_connection(pkt) ? AGENT_FLOW_CLOSING : otherwise;
}

/* Notes that the balancer knows the flow, so that the packets of this server go straight to the
 * client. The state of a flow that is ending or closing stays. */
static __always_inline void note_known(const struct envelope *envelope, const struct packet *pkt,
				       const struct local_flow *flow)
{
	enum agent_flow_state otherwise =
		flow->entry.state == AGENT_FLOW_CLOSING ? AGENT_FLOW_CLOSING : AGENT_FLOW_DIRECT;

	update_agent_flow(flow, envelope, next_agent_state(pkt, flow, otherwise));
}

/* Handles ack-stickiness: notes that the balancer knows the flow. The packet is delivered in any
 * case. If this server does not have the flow, the stack resets it, and the reset signals the end
 * to the balancer (signal.h). */
static __always_inline enum agent_reason
handle_ack(struct xdp_md *ctx, const struct envelope *envelope, const struct packet *pkt)
{
	struct local_flow flow;

	find_agent_flow(&pkt->key, &flow);
	/* A SYN, FIN or RST makes an entry only if there is a socket. */
	if (is_entered(&flow) || !(pkt->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST)) ||
	    is_live(find_socket_kinds(ctx, pkt, NULL)))
		note_known(envelope, pkt, &flow);
	return AGENT_NONE;
}

/* A token bucket for resets (net/token.h), because anybody can send packets that cause resets, in
 * any client's name. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} resets SEC(".maps");

/* Takes a token for a reset. False: the rate limit is exceeded. */
static __always_inline bool may_reset_now(void)
{
	__u32 key = 0;

	return take_token(bpf_map_lookup_elem(&resets, &key));
}

/* Handles a packet of a flow that no server has: delivers it, so that the stack resets the
 * connection, if the service is configured so. Otherwise drops it, as it drops ICMP errors. */
static __always_inline enum agent_reason refuse_unknown_flow(const struct packet *pkt)
{
	struct service_key key = {};
	const struct acceptance *acceptance = find_acceptance(&pkt->key, &key);

	if (!acceptance || !acceptance->reset || pkt->kind == PACKET_ICMP_ERROR)
		return AGENT_DROP_NOT_LOCAL;
	return may_reset_now() ? AGENT_DELIVER_NOT_LOCAL : AGENT_DROP_RATE_LIMIT;
}

/*
 * Handles a packet whose flow this server does not have, except perhaps in TIME_WAIT:
 *
 *	- Another server is left to ask: the packet goes on to it. The client may have a new
 *	  connection from the same port there, even if this server has a socket in TIME_WAIT.
 *	- A hint has led the packet here: it is returned, and the balancer asks the other servers.
 *	- This server has a socket in TIME_WAIT: that socket gets the packet, even if a cookie has
 *	  led the packet here. A new connection on another server would have another cookie. A
 *	  cookie seldom misleads (docs/understand/protocol.md, "Returned packets").
 *	- Otherwise the packet is returned if the balancer wants it back, and refused if not.
 */
static __always_inline enum agent_reason handle_not_local(const struct envelope *envelope,
							  const struct packet *pkt, int kinds)
{
	bool wanted_back = wants_return(envelope);

	if (!is_last_server(envelope))
		return AGENT_NEXT_NOT_LOCAL;
	if (kinds & SOCKET_TIME_WAIT && (!wanted_back || cookie_width_of_sid(envelope->sid_low)))
		return AGENT_NONE;
	return wanted_back ? AGENT_RETURN_NOT_LOCAL : refuse_unknown_flow(pkt);
}

/*
 * Handles recover-stickiness and steer. Only sockets tell whether this server has the flow. An
 * entry may be of a connection that is over, while another server has the client's next connection
 * from the same port. If this server has the flow, the packet is delivered, and the first of these
 * cases decides about the entry:
 *
 *	- Steer, and the packet has a cookie: take_cookie() decides.
 *	- The flow is half-open, and has a cookie: the entry stays as it is.
 *	- Steer: the entry stays as it is. But if a hint has led the packet here, the entry notes
 *	  that the balancer knows the flow.
 *	- Recover-stickiness: the flow waits, so that the server's next packet signals it to the
 *	  balancer. A flow that is ending stays so, and FIN or RST makes the flow closing.
 */
static __always_inline enum agent_reason
handle_recover(struct xdp_md *ctx, const struct envelope *envelope, const struct packet *pkt)
{
	int kinds = find_socket_kinds(ctx, pkt, NULL);
	struct local_flow flow;

	if (!is_live(kinds) && !(kinds & SOCKET_COOKIE))
		return handle_not_local(envelope, pkt, kinds);
	if (function_of(envelope) == SID_STEER && cookie_width_of_sid(envelope->sid_low)) {
		take_cookie(ctx, envelope, pkt, kinds);
		return AGENT_NONE;
	}
	find_agent_flow(&pkt->key, &flow);
	if (keeps_cookie(&flow, kinds))
		return AGENT_NONE;
	if (function_of(envelope) == SID_STEER) {
		if (wants_return(envelope)) /* a hint has led the packet to this server alone */
			note_known(envelope, pkt, &flow);
		return AGENT_NONE;
	}
	update_agent_flow(&flow, envelope, next_agent_state(pkt, &flow, AGENT_FLOW_WAIT));
	return AGENT_NONE;
}

/* Whether the sender is a balancer. Signals go to the sender of a packet, so strangers must not be
 * accepted. */
static __always_inline bool is_balancer(__u64 sender)
{
	struct locator_prefix key = { .length = 64 };

	if (!balancers_are_named)
		return true;
	__builtin_memcpy(key.locator, &sender, sizeof(key.locator));
	return bpf_map_lookup_elem(&balancers, &key);
}

#endif
