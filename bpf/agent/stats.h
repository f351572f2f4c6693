/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every frame leaves the agent for exactly one reason, and every reason is
 * counted. The names become the `reason` label of segue_agent_packets_total:
 * REASON_DROP_FRAGMENT is drop_fragment. Keep the groups together: the prefix
 * says what happens to the frame.
 */
#ifndef SEGUE_AGENT_STATS_H
#define SEGUE_AGENT_STATS_H

#include "net/types.h"

enum reason {
	REASON_NONE, /* still on its way */

	/* Not ours, or not surely: up the host's own stack, untouched. */
	REASON_PASS_NOT_IP,
	REASON_PASS_NOT_FOR_HOST,  /* another MAC address, multicast, broadcast */
	REASON_PASS_NOT_FOR_AGENT, /* neither a SID nor a tunnel of this node */
	REASON_PASS_HOST,	   /* a SID without a function: the host itself */
	REASON_PASS_IP_HEADER,	   /* to no SID, and malformed */
	REASON_PASS_FRAGMENT,	   /* of a tunnel's packet: the stack reassembles */
	REASON_PASS_GRE,	   /* version, flags or protocol that no balancer sends */
	REASON_PASS_OTHER_TUNNEL,  /* the inner destination is no VIP of ours */

	/* Freed of its encapsulation, up the stack to the VIP. */
	REASON_DELIVER_SRV6_INSERT,
	REASON_DELIVER_SRV6_ENCAP,
	REASON_DELIVER_GRE,
	REASON_DELIVER_IPIP,
	REASON_DELIVER_NOT_LOCAL, /* a flow that no server has: the stack answers with a reset */

	/* For the next server of the list. */
	REASON_NEXT_SEGMENT,   /* this one does not have the VIP */
	REASON_NEXT_REFUSED,   /* this one did not want the connection */
	REASON_NEXT_NOT_LOCAL, /* this one does not have the flow */

	/* Back to the balancer that asked. */
	REASON_ANSWER_PROBE,

	/* For a SID or a VIP of ours, but not to be delivered. */
	REASON_DROP_IP_HEADER,
	REASON_DROP_OUTSIDE, /* what only hosts of the domain may send */
	REASON_DROP_UNKNOWN_FUNCTION,
	REASON_DROP_EXTENSION, /* hop-by-hop options: truncated */
	REASON_DROP_FRAGMENT,
	REASON_DROP_ROUTING_TYPE,      /* not a segment routing header */
	REASON_DROP_SRH_TRUNCATED,     /* longer than the packet */
	REASON_DROP_SRH_LAST_ENTRY,    /* the list is longer than the header */
	REASON_DROP_SRH_SEGMENTS_LEFT, /* beyond the list, or none left before the VIP */
	REASON_DROP_NOT_ENCAPSULATED,  /* neither a segment routing header nor a packet in it */
	REASON_DROP_INNER_HEADER,      /* version or length of the packet in it */
	REASON_DROP_NOT_SERVED,	       /* the VIP is none of ours, and no server is left */
	REASON_DROP_SENDER,	       /* from no balancer of ours: about a flow, or to travel on */
	REASON_DROP_TRANSPORT,	       /* a function about a flow, and no TCP header to name it */
	REASON_DROP_PROBE,	       /* a probe without a token */
	REASON_DROP_NOT_LOCAL,	       /* the flow is not here, and no server is left */
	REASON_DROP_RATE_LIMIT,	       /* the same, to be reset, but too many were */
	REASON_DROP_NEXT_SEGMENT,      /* the segment that comes next is no other server's */
	REASON_DROP_HOP_LIMIT,
	REASON_DROP_ECN,     /* congestion met, and the sender would not learn: RFC 6040 */
	REASON_DROP_REWRITE, /* the kernel refused the change */

	REASON_COUNT,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_COUNT);
	__type(key, __u32);
	__type(value, struct counter);
} reasons SEC(".maps");

static __always_inline void count(enum reason why, __u32 bytes)
{
	__u32 key = why;
	struct counter *counter = bpf_map_lookup_elem(&reasons, &key);

	if (!counter)
		return;
	counter->packets++;
	counter->bytes += bytes;
}

/* What became of a SYN-ACK of a service: the `result` label of
 * segue_agent_syn_acks_total. */
enum syn_ack {
	SYN_ACK_CLAMPED,
	SYN_ACK_FITS,	   /* its MSS was small enough */
	SYN_ACK_NO_OPTION, /* no MSS: the client takes 536 or 1220 (RFC 9293 section 3.7.1) */
	SYN_ACK_MALFORMED, /* options; left alone */

	SYN_ACK_COUNT,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SYN_ACK_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} syn_acks SEC(".maps");

static __always_inline void count_syn_ack(enum syn_ack result)
{
	__u32 key = result;
	__u64 *counter = bpf_map_lookup_elem(&syn_acks, &key);

	if (counter)
		(*counter)++;
}

/* What became of a signal to a balancer: the `signal` label of
 * segue_agent_signals_total. */
enum signal {
	SIGNAL_CREATE,	 /* create-stickiness */
	SIGNAL_REMOVE,	 /* remove-stickiness */
	SIGNAL_TOO_LONG, /* no room for it, or in pieces, or to be: the next one signals */
	SIGNAL_FAILED,	 /* the kernel refused the change */

	SIGNAL_COUNT,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SIGNAL_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} signals SEC(".maps");

static __always_inline void count_signal(enum signal result)
{
	__u32 key = result;
	__u64 *counter = bpf_map_lookup_elem(&signals, &key);

	if (counter)
		(*counter)++;
}

#endif
