/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every frame leaves the agent for exactly one reason, and every reason is
 * counted. The names become the `reason` label of segue_agent_packets_total:
 * AGENT_DROP_FRAGMENT is drop_fragment. Keep the groups together: the prefix
 * says what happens to the frame.
 */
#ifndef SEGUE_AGENT_STATS_H
#define SEGUE_AGENT_STATS_H

#include "net/types.h"

enum agent_reason {
	AGENT_NONE, /* still on its way */

	/* Not for the agent, or possibly not: to the host's own stack, unchanged. */
	AGENT_PASS_NOT_IP,
	AGENT_PASS_NOT_FOR_HOST,  /* another MAC address, multicast, broadcast */
	AGENT_PASS_NOT_FOR_AGENT, /* neither a SID nor a tunnel of this node */
	AGENT_PASS_HOST,	  /* a SID without a function: the host itself */
	AGENT_PASS_IP_HEADER,	  /* malformed, and not to a SID */
	AGENT_PASS_FRAGMENT,	  /* of a packet in a tunnel: the stack reassembles it */
	AGENT_PASS_GRE,		  /* in a format that balancers do not send */
	AGENT_PASS_OTHER_TUNNEL,  /* the inner destination is not a VIP of this node */

	/* Decapsulated, and delivered to the VIP. */
	AGENT_DELIVER_SRV6_INSERT,
	AGENT_DELIVER_SRV6_ENCAP,
	AGENT_DELIVER_GRE,
	AGENT_DELIVER_IPIP,
	AGENT_DELIVER_NOT_LOCAL, /* no server has the flow: the stack sends a reset */

	/* Passed on to the next server of the list. */
	AGENT_NEXT_SEGMENT,	/* this server does not serve the VIP */
	AGENT_NEXT_REFUSED,	/* this server did not accept the connection */
	AGENT_NEXT_NOT_LOCAL,	/* this server does not have the flow */
	AGENT_NEXT_RETURNED,	/* handed back to a candidate with a lower load */
	AGENT_RETURN_NOT_LOCAL, /* returned to the balancer: this server does not have the flow */

	/* Probes, which became answers to the balancer. */
	AGENT_ANSWER_PROBE,

	/* For a SID or a VIP of this node, but dropped. */
	AGENT_DROP_IP_HEADER,
	AGENT_DROP_OUTSIDE,  /* a packet that only hosts of the domain may send */
	AGENT_DROP_STRANGER, /* to the port of the underlay, of another host than its sources */
	AGENT_DROP_UNDERLAY, /* malformed in the underlay, or not to a SID of this node */
	AGENT_DROP_UNKNOWN_FUNCTION,
	AGENT_DROP_EXTENSION, /* truncated hop-by-hop options */
	AGENT_DROP_FRAGMENT,
	AGENT_DROP_ROUTING_TYPE,      /* not a segment routing header */
	AGENT_DROP_SRH_TRUNCATED,     /* the header is longer than the packet */
	AGENT_DROP_SRH_LAST_ENTRY,    /* the list is longer than the header */
	AGENT_DROP_SRH_SEGMENTS_LEFT, /* segments left beyond the list, or none left for the VIP */
	AGENT_DROP_TOO_MANY_SERVERS,  /* the list has more servers left than a balancer names */
	AGENT_DROP_NOT_ENCAPSULATED,  /* neither a segment routing header nor an inner packet */
	AGENT_DROP_INNER_HEADER,      /* wrong version or length of the inner packet */
	AGENT_DROP_NOT_SERVED,	      /* not a VIP of this node, and no server is left */
	AGENT_DROP_SENDER,	      /* not from a configured balancer */
	AGENT_DROP_TRANSPORT,	      /* a function about a flow, but no TCP header */
	AGENT_DROP_TCP_FLAGS,	      /* the offer of a packet that does not open a connection */
	AGENT_DROP_PROBE,	      /* a probe without a token */
	AGENT_DROP_NOT_LOCAL,	      /* no server of the list has the flow */
	AGENT_DROP_RATE_LIMIT,	      /* the rate limit of resets is exceeded */
	AGENT_DROP_NEXT_SEGMENT,      /* the next segment is not another server */
	AGENT_DROP_HOP_LIMIT,
	AGENT_DROP_ECN,	    /* marked, but the sender does not understand marks: RFC 6040 */
	AGENT_DROP_REWRITE, /* the kernel refused the change */

	AGENT_COUNT,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, AGENT_COUNT);
	__type(key, __u32);
	__type(value, struct counter);
} reasons SEC(".maps");

/* Counts a frame under a reason. `bytes` is its length without the Ethernet header. */
static __always_inline void count_frame(enum agent_reason why, __u32 bytes)
{
	__u32 key = why;
	struct counter *counter = bpf_map_lookup_elem(&reasons, &key);

	if (!counter)
		return;
	counter->packets++;
	counter->bytes += bytes;
}

/* The result of clamping a SYN-ACK: the `result` label of segue_agent_syn_acks_total. */
enum syn_ack {
	SYN_ACK_CLAMPED,
	SYN_ACK_FITS,	   /* its MSS was small enough */
	SYN_ACK_NO_OPTION, /* no MSS: the client takes 536 or 1220 (RFC 9293 section 3.7.1) */
	SYN_ACK_MALFORMED, /* malformed options; unchanged */

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

/* The signal of a packet: the `signal` label of segue_agent_signals_total. */
enum sent_signal {
	SENT_CREATE,   /* create-stickiness */
	SENT_REMOVE,   /* remove-stickiness */
	SENT_TOO_LONG, /* no room in this packet: a later one signals */
	SENT_FAILED,   /* the kernel refused the change */

	SENT_COUNT,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SENT_COUNT);
	__type(key, __u32);
	__type(value, __u64);
} signals SEC(".maps");

static __always_inline void count_sent_signal(enum sent_signal result)
{
	__u32 key = result;
	__u64 *counter = bpf_map_lookup_elem(&signals, &key);

	if (counter)
		(*counter)++;
}

/* How a connection ID of QUIC compares with this server's: the `result` label of
 * segue_agent_quic_ids_total. */
enum quic_id_result {
	QUIC_ID_ISSUED_OWN,	 /* the application issued it, and it names this server */
	QUIC_ID_ISSUED_OTHER,	 /* the application issued it, and it does not name this server */
	QUIC_ID_DELIVERED_OTHER, /* its packet was delivered here, and it names another server */

	QUIC_ID_COUNT,
};

#endif
