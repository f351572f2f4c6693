/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Handles packets from the balancer whose SIDs have functions about flows: those of TCP as
 * handshake.h says, and those of QUIC as initial.h says.
 */
#ifndef SEGUE_AGENT_FLOW_FUNCTION_H
#define SEGUE_AGENT_FLOW_FUNCTION_H

#include "handshake.h"
#include "initial.h"

/* Handles a later fragment. If it is steered, it goes where its packet's first fragment went: here,
 * or to the next server, if there is one. With any other function, it is delivered. */
static __always_inline enum agent_reason handle_later_fragment(const struct envelope *envelope,
							       const struct client_packet *client)
{
	if (function_of(envelope) != SID_STEER || first_was_delivered(client))
		return AGENT_NONE;
	return is_last_server(envelope) ? AGENT_DROP_NOT_LOCAL : AGENT_NEXT_NOT_LOCAL;
}

/* Whether a packet can be offered: a listening socket takes a SYN, but neither with FIN nor with
 * RST. */
static __always_inline bool opens_connection(const struct packet *pkt)
{
	return starts_connection(pkt) && !contradicts_itself(pkt);
}

/*
 * Handles a packet to a VIP of this server with a function about flows. The reason is none if the
 * packet is to be delivered.
 */
static __always_inline enum agent_reason handle_flow_function(struct xdp_md *ctx,
							      const struct envelope *envelope)
{
	struct client_packet client = {};
	enum agent_reason why;

	if (!is_balancer(envelope->sender))
		return AGENT_DROP_SENDER;
	if (!read_client(ctx, envelope, &client) ||
	    (client.packet.kind == PACKET_ICMP_ERROR && function_of(envelope) != SID_STEER))
		/* The balancer knows that a packet with ack-stickiness is for this server. */
		return function_of(envelope) == SID_ACK ? AGENT_NONE : AGENT_DROP_TRANSPORT;
	if (client.fragment.is_later)
		return handle_later_fragment(envelope, &client);
	if (client.packet.key.protocol == IPPROTO_UDP)
		return function_of(envelope) == SID_ACK
			       ? AGENT_NONE
			       : handle_initial(ctx, envelope, &client.packet);
	if (function_of(envelope) == SID_ACK)
		why = handle_ack(ctx, envelope, &client.packet);
	else if (function_of(envelope) == SID_RECOVER || function_of(envelope) == SID_STEER)
		why = handle_recover(ctx, envelope, &client.packet);
	else
		why = opens_connection(&client.packet)
			      ? handle_connect(ctx, envelope, &client.packet)
			      : AGENT_DROP_TCP_FLAGS;
	if (!why && client.fragment.identification)
		note_delivered_fragment(&client);
	return why;
}

#endif
