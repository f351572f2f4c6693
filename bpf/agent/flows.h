/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The server's flow table: table III of 6LB, "Scalable and Application-Aware Load Balancing with
 * Segment Routing". An entry names the balancer that gets the signals of a connection. Whether a
 * connection exists, the sockets tell (local.h). If an entry is lost, so is a remove-stickiness,
 * but no connection.
 */
#ifndef SEGUE_AGENT_FLOWS_H
#define SEGUE_AGENT_FLOWS_H

#include "net/dryrun.h"
#include "envelope.h"
#include "net/report.h"

#define MAX_AGENT_FLOWS 131072
/* How long an ended flow is remembered (6LB table III). */
#define CLOSING_LIFETIME 10000000000LL /* ns */
/* The longest time in which a client repeats its SYN. RFC 6298 section 2.5 permits a maximum
 * timeout of 60 s or more, and Linux has 120 s. A later SYN is a new connection. */
#define REPEAT_LIFETIME 120000000000LL /* ns */

enum agent_flow_state {
	AGENT_FLOW_LISTEN,  /* not in the table */
	AGENT_FLOW_WAIT,    /* the application's packets go to the balancer, with a signal */
	AGENT_FLOW_DIRECT,  /* the balancer knows the flow; packets go straight to the client */
	AGENT_FLOW_ENDING,  /* the end is not signalled yet: the next packet with room signals it */
	AGENT_FLOW_CLOSING, /* one side has ended the connection */
};

struct agent_flow {
	__u64 balancer; /* its locator, in memory order */
	__u64 since;	/* ns of the coarse monotonic clock */
	__u8 state;	/* enum agent_flow_state */
	__u8 encapsulation;
	__u8 told;	   /* the end was signalled to this balancer */
	__u8 wants_report; /* this balancer takes load reports of the flow */
	__u16 first;	   /* what a report says about the first candidate (REPORT_FIRST_MASK) */
	__u8 pad[2];
};

/* By the key of the client's packets, whose source is the client. The oldest entry is evicted. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_AGENT_FLOWS);
	__type(key, struct flow_key);
	__type(value, struct agent_flow);
} agent_flows SEC(".maps");

static __always_inline const struct agent_flow *find_agent_flow(const struct flow_key *key)
{
	const struct agent_flow *flow = bpf_map_lookup_elem(&agent_flows, key);

	if (flow && flow->state == AGENT_FLOW_CLOSING &&
	    (__s64)(bpf_ktime_get_coarse_ns() - flow->since) > CLOSING_LIFETIME)
		return NULL;
	return flow;
}

/* Replaces the whole entry, so that readers never see half of a change. A dry run leaves it. */
static __always_inline void put_agent_flow(const struct flow_key *key, struct agent_flow *flow)
{
	if (dry_run)
		return;
	flow->since = bpf_ktime_get_coarse_ns();
	bpf_map_update_elem(&agent_flows, key, flow, BPF_ANY);
}

/* Whether the balancer takes load reports of the flow, after a packet of the flow. Only offers and
 * ack-stickiness say so. After another packet of the same balancer, it is as before. */
static __always_inline bool wants_report(const struct agent_flow *flow,
					 const struct envelope *envelope)
{
	if (envelope->function <= SID_ACK)
		return bpf_be64_to_cpu(envelope->sid_low) & LOAD_WANTS_REPORT;
	return flow && flow->balancer == envelope->sender && flow->wants_report;
}

/* The entry of a flow after a packet from a balancer. */
static __always_inline struct agent_flow agent_flow_of(const struct agent_flow *before,
						       const struct envelope *envelope,
						       enum agent_flow_state state)
{
	struct agent_flow flow = {
		.balancer = envelope->sender,
		.state = state,
		.encapsulation = envelope->encapsulation,
		.wants_report = wants_report(before, envelope),
		.first = REPORT_NO_COLUMN,
	};

	return flow;
}

/* Updates the entry if the packet changes it. Most packets of a flow do not. */
static __always_inline void update_agent_flow(const struct flow_key *key,
					      const struct agent_flow *flow,
					      const struct envelope *envelope,
					      enum agent_flow_state state)
{
	struct agent_flow now = agent_flow_of(flow, envelope, state);

	if (flow && flow->state == now.state && flow->balancer == now.balancer &&
	    flow->encapsulation == now.encapsulation && flow->wants_report == now.wants_report)
		return;
	put_agent_flow(key, &now);
}

#endif
