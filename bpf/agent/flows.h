/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The server's flow table: table III of 6LB, "Scalable and Application-Aware Load Balancing with
 * Segment Routing". An entry names the balancer that gets the signals of a connection. Whether a
 * connection exists is known from the sockets (local.h). So a lost entry costs a remove-stickiness,
 * but no connection.
 */
#ifndef SEGUE_AGENT_FLOWS_H
#define SEGUE_AGENT_FLOWS_H

#include "envelope.h"
#include "flowtable.h"
#include "net/report.h"

/* How long an ended flow is remembered (6LB table III). */
#define CLOSING_LIFETIME 10000000000ULL /* ns */
/* The longest time in which a client repeats its SYN. RFC 6298 section 2.5 permits a maximum
 * timeout of 60 s or more, and Linux has 120 s. A later SYN is a new connection. The table also
 * remembers cookies for so long: TIME_WAIT is shorter. */
#define REPEAT_LIFETIME 120000000000ULL /* ns */

/* A flow, as a lookup found it. */
struct local_flow {
	struct agent_flow_place place;
	struct agent_flow entry; /* its state is AGENT_FLOW_LISTEN if there is none */
};

/* Looks up a flow by the key of the client's packets, whose source is the client. An entry that is
 * closing or holds a cookie counts as none when its lifetime is over. */
static __always_inline void find_agent_flow(const struct flow_key *key, struct local_flow *flow)
{
	flow->place = agent_place_of(key);
	agent_flow_find(&flow->place, &flow->entry);
	if (flow->entry.state >= AGENT_FLOW_CLOSING &&
	    agent_flow_age(&flow->entry) >
		    (flow->entry.state == AGENT_FLOW_CLOSING ? CLOSING_LIFETIME : REPEAT_LIFETIME))
		flow->entry = (struct agent_flow){};
}

/* Whether the flow has an entry. */
static __always_inline bool is_entered(const struct local_flow *flow)
{
	return flow->entry.state != AGENT_FLOW_LISTEN;
}

/* Whether the balancer of a packet takes load reports of the packet's flow. Offers and
 * ack-stickiness say so. After any other packet, the answer stays if the packet comes from the same
 * balancer; after a packet of another balancer, it is no. */
static __always_inline bool wants_report(const struct agent_flow *before,
					 const struct envelope *envelope)
{
	if (function_of(envelope) <= SID_ACK) /* an offer, or ack-stickiness */
		return bpf_be64_to_cpu(envelope->sid_low) & LOAD_WANTS_REPORT;
	return before->balancer == envelope->sender && before->wants_report;
}

/* The entry of a flow after a packet from a balancer. */
static __always_inline struct agent_flow agent_flow_of(const struct agent_flow *before,
						       const struct envelope *envelope,
						       enum agent_flow_state state)
{
	struct agent_flow entry = {
		.balancer = envelope->sender,
		.state = state,
		.encapsulation = envelope->encapsulation,
		.wants_report = wants_report(before, envelope),
		.first = REPORT_NO_COLUMN,
	};

	return entry;
}

/* Updates the entry if the packet changes it. Most packets of a flow do not. */
static __always_inline void update_agent_flow(const struct local_flow *flow,
					      const struct envelope *envelope,
					      enum agent_flow_state state)
{
	const struct agent_flow *before = &flow->entry;
	struct agent_flow now = agent_flow_of(before, envelope, state);

	if (before->state == now.state && before->balancer == now.balancer &&
	    before->encapsulation == now.encapsulation && before->wants_report == now.wants_report)
		return;
	agent_flow_put(&flow->place, &now);
}

#endif
