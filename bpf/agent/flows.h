/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the server knows of the connections that it was offered: table III of 6LB,
 * "Scalable and Application-Aware Load Balancing with Segment Routing". It says
 * whom to tell what becomes of a connection; which ones there are, the sockets say
 * (local.h). An entry that is lost costs a remove-stickiness, and no connection.
 */
#ifndef SEGUE_AGENT_FLOWS_H
#define SEGUE_AGENT_FLOWS_H

#include "envelope.h"

#define MAX_AGENT_FLOWS 131072
/* How long a flow is remembered that has ended (6LB table III). */
#define CLOSING_LIFETIME 10000000000LL /* ns */
/* How long a client may take to repeat its SYN: the longest timeout (RFC 6298 section 2.5
 * allows any of 60 s and more; Linux has 120). After that the connection is a new one. */
#define REPEAT_LIFETIME 120000000000LL /* ns */

enum agent_flow_state {
	AGENT_FLOW_LISTEN,  /* not in the table */
	AGENT_FLOW_WAIT,    /* what the application sends goes through the balancer */
	AGENT_FLOW_DIRECT,  /* the balancer knows; what it sends goes to the client */
	AGENT_FLOW_ENDING,  /* the end could not be told yet: the next packet that fits does */
	AGENT_FLOW_CLOSING, /* one side has ended it */
};

struct agent_flow {
	__u64 balancer; /* its locator, in memory order */
	__u64 since;	/* ns of the coarse monotonic clock */
	__u8 state;	/* enum agent_flow_state */
	__u8 encapsulation;
	__u8 told; /* the end, to this balancer */
	__u8 pad[5];
};

/* By the client's packets: the source is the client. The oldest make room. */
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

/* Replaced whole, so that whoever reads it sees nothing half done. */
static __always_inline void put_agent_flow(const struct flow_key *key, struct agent_flow *flow)
{
	flow->since = bpf_ktime_get_coarse_ns();
	bpf_map_update_elem(&agent_flows, key, flow, BPF_ANY);
}

static __always_inline void store_agent_flow(const struct flow_key *key, __u64 balancer,
					     __u8 encapsulation, enum agent_flow_state state)
{
	struct agent_flow flow = {
		.balancer = balancer,
		.state = state,
		.encapsulation = encapsulation,
	};

	put_agent_flow(key, &flow);
}

/* Takes on what the packet says. Most packets of a flow say nothing new. */
static __always_inline void update_agent_flow(const struct flow_key *key,
					      const struct agent_flow *flow,
					      const struct envelope *envelope,
					      enum agent_flow_state state)
{
	if (flow && flow->state == state && flow->balancer == envelope->sender &&
	    flow->encapsulation == envelope->encapsulation)
		return;
	store_agent_flow(key, envelope->sender, envelope->encapsulation, state);
}

#endif
