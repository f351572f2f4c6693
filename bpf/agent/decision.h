/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The record of a dry run (net/dryrun.h): what xdp_agent decides about a packet, and what it knows
 * about the packet's flow. Only xdp_agent supports dry runs. A dry run has two side effects: it
 * takes the lock of a policy, and its lookups mark entries of LRU maps as used.
 */
#ifndef SEGUE_AGENT_DECISION_H
#define SEGUE_AGENT_DECISION_H

#include "net/dryrun.h"
#include "maps.h"

struct decision {
	__u32 verdict;	      /* enum xdp_action */
	__u32 reason;	      /* enum agent_reason */
	struct in6_addr next; /* the SID that the packet goes on or back to; else 0 */

	/* The packet as an offer of a connection. */
	__u8 is_offer;	 /* the packet offers the connection to a service with an accept policy */
	__u8 offer;	 /* enum offer */
	__u8 asked_load; /* the policy asked for the load */
	__u8 load_known; /* the load was known */
	__u32 busy;	 /* in the units of the load source, as in struct load */
	__u32 capacity;

	/* The flow, even if the decision does not depend on it. */
	__u8 has_flow;		    /* the packet is a TCP packet, or an ICMP error about one */
	__u8 flow_state;	    /* enum agent_flow_state of the agent's entry */
	__u16 socket;		    /* BPF_TCP_* of the socket that the packet meets; 0: none */
	__u64 balancer;		    /* locator of the balancer in the agent's entry */
	__u64 age;		    /* age of the agent's entry, in ns */
	struct service_key service; /* the service whose policy applies; protocol 0: none */
	__u8 pad[4];
};

/* The record is in a section of its own: a program and its dry run share the other variables, but
 * not the record. User space sets the record to zero before each run. */
struct decision record SEC(".data.decision");

#endif
