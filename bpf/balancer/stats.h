/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Every packet leaves the balancer for exactly one reason, and every reason is counted. The names
 * become the `reason` label of segue_lb_packets_total: LB_DROP_FRAGMENT is drop_fragment. Keep the
 * groups together: the prefix tells what happens to the packet. FORWARDS counts from the first
 * forward reason to the last.
 */
#ifndef SEGUE_BALANCER_STATS_H
#define SEGUE_BALANCER_STATS_H

#include "balancer/decision.h"
#include "net/parse.h"

enum lb_reason {
	LB_NONE, /* still on its way */

	/* To the host's own stack, unchanged. All but the last are not for a VIP. */
	LB_PASS_NOT_IP,
	LB_PASS_VLAN,	      /* with a VLAN tag */
	LB_PASS_NOT_FOR_HOST, /* another MAC address, multicast, broadcast */
	LB_PASS_NOT_VIP,
	LB_PASS_SOLICITATION, /* a host of the link asks whether the VIP is still here */

	/* A server's packet without its signal, on its way to the client by tc_return. */
	LB_RETURN_CREATE,  /* the server has accepted the flow */
	LB_RETURN_NO_ROOM, /* the same, but the tables had no room for the flow */
	LB_RETURN_REMOVE,  /* the flow is ending */

	LB_COPY_ICMP, /* an ICMP error of an unknown flow, to all servers of its service */

	/* To a server. */
	LB_FORWARD_KNOWN,   /* persistence named the server */
	LB_FORWARD_NEW,	    /* placed, and entered in the flow table if the service uses it */
	LB_FORWARD_HUNT,    /* offered to candidates; not entered anywhere */
	LB_FORWARD_RECOVER, /* a later packet of an unknown flow: placed, or sent to candidates */
	LB_FORWARD_NO_ROOM, /* placed, but the flow table had no room for the flow */
	/* A reset to a server that has accepted a flow which another server has. */
	LB_FORWARD_RESET,
	LB_FORWARD_FRAGMENT, /* a later fragment */
	LB_FORWARD_ICMP,     /* an ICMP error about the flow */

	/* Answered by an ICMP message or a TCP reset to the sender. */
	LB_ANSWER_ECHO,	      /* a ping */
	LB_ANSWER_HOP_LIMIT,  /* time exceeded */
	LB_ANSWER_TOO_BIG,    /* longer than the MTU towards the server allows */
	LB_ANSWER_NO_SERVICE, /* no service of the VIP has this port */
	LB_ANSWER_NO_SERVER,  /* the service has no server to place on */

	/* For the balancer itself. */
	LB_TAKE_PROBE,	  /* a server's answer to a probe */
	LB_TAKE_FRAGMENT, /* a later fragment, which is held until the first one comes */

	LB_DROP_GROUP_SOURCE, /* its source MAC address is that of a group */

	/* For a VIP, but dropped. */
	LB_DROP_IP_HEADER,
	LB_DROP_EXTENSION,
	LB_DROP_ROUTING_HEADER,
	LB_DROP_FRAGMENT, /* a first fragment without all headers */
	/* A later fragment whose first one is unknown, and that cannot be held. */
	LB_DROP_FRAGMENT_UNKNOWN,
	/* A later fragment that is not held, because too many others are. */
	LB_DROP_FRAGMENT_ROOM,
	LB_DROP_PROTOCOL,
	LB_DROP_TRANSPORT,
	LB_DROP_TCP_FLAGS,	 /* SYN with FIN or RST */
	LB_DROP_NO_SERVICE,	 /* the same as LB_ANSWER_NO_SERVICE, without an answer */
	LB_DROP_SOURCE,		 /* its client is not in the service's source prefixes */
	LB_DROP_REMOVED_VIP,	 /* the last service of the VIP was removed not long ago */
	LB_DROP_ICMP_TYPE,	 /* neither an error about a packet nor a ping */
	LB_DROP_ICMP_QUOTE,	 /* an error that names no flow from the VIP */
	LB_DROP_ICMP_NO_SERVICE, /* an error about a flow of no service */
	LB_DROP_OUTSIDE,	 /* a packet that only hosts of the domain may send */
	LB_DROP_STRANGER,	 /* to the port of the underlay, of another host than its sources */
	LB_DROP_UNDERLAY,	 /* malformed in the underlay, or not for the balancer itself */
	LB_DROP_SIGNAL,		 /* a malformed signal, or answer to a probe */
	LB_DROP_SENDER,		 /* a signal, a returned packet or an answer of a wrong sender */
	LB_DROP_TAG,		 /* a signal without a valid tag */
	LB_DROP_HOP_LIMIT,	 /* hop limit exceeded, and no answer is permitted */
	LB_DROP_NO_SERVER,	 /* the same as LB_ANSWER_NO_SERVER, without an answer */
	LB_DROP_NO_NEXT_HOP,
	LB_DROP_TOO_BIG,     /* too long, and no answer is permitted */
	LB_DROP_RATE_LIMIT,  /* the rate limit of answers is exceeded */
	LB_DROP_NO_HEADROOM, /* the driver left no room for the headers */

	LB_COUNT,
};

/* Counters by reason. Packets to servers are counted in server_counters instead. Of these, this map
 * has only the sums of removed servers, which user space adds. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LB_COUNT);
	__type(key, __u32);
	__type(value, struct counter);
} reasons SEC(".maps");

#define FIRST_FORWARD LB_FORWARD_KNOWN
#define FORWARDS (LB_FORWARD_ICMP - FIRST_FORWARD + 1)

/* Packets to a server, by reason. */
struct server_counter {
	struct counter forwarded[FORWARDS];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__type(key, __u32);
	__type(value, struct server_counter);
} server_counters SEC(".maps");

/* Signals of a server, including those that changed nothing. */
struct signal_counter {
	__u64 created;
	__u64 removed;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__type(key, __u32);
	__type(value, struct signal_counter);
} server_signals SEC(".maps");

/* Answered SYNs, by the server that they were offered to first, whichever server answered. User
 * space compares them with the offers (LB_FORWARD_HUNT). */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__type(key, __u32);
	__type(value, __u64);
} answered_offers SEC(".maps");

/* Whether the reason says that the packet goes to a server. */
static __always_inline bool is_forward(enum lb_reason why)
{
	return why >= FIRST_FORWARD && why < FIRST_FORWARD + FORWARDS;
}

#define FIRST_ANSWER LB_ANSWER_ECHO
#define ANSWERS (LB_ANSWER_NO_SERVER - FIRST_ANSWER + 1)

/* Whether the frame now holds an answer to its sender. */
static __always_inline bool is_answer(enum lb_reason why)
{
	return why >= FIRST_ANSWER && why < FIRST_ANSWER + ANSWERS;
}

/* The reason of a packet with this result of parsing, if it is to a VIP. */
static __always_inline enum lb_reason reason_of(enum parse_result result)
{
	switch (result) {
	case PARSE_OK:
		return LB_NONE;
	case PARSE_NOT_IP:
		return LB_PASS_NOT_IP;
	case PARSE_IP_HEADER:
		return LB_DROP_IP_HEADER;
	case PARSE_EXTENSION:
		return LB_DROP_EXTENSION;
	case PARSE_SEGMENTS_LEFT:
		return LB_DROP_ROUTING_HEADER;
	case PARSE_FRAGMENT:
		return LB_DROP_FRAGMENT;
	case PARSE_OTHER_PROTOCOL:
		return LB_DROP_PROTOCOL;
	case PARSE_TRANSPORT:
		return LB_DROP_TRANSPORT;
	}
	return LB_DROP_IP_HEADER;
}

static __always_inline void add(struct counter *counter, const struct packet *pkt)
{
	counter->packets++;
	counter->bytes += pkt->length;
}

/* Counts a packet that leaves for this reason. */
static __always_inline void count_packet(enum lb_reason why, const struct packet *pkt)
{
	__u32 key = why;
	struct counter *counter = bpf_map_lookup_elem(&reasons, &key);

	note_reason(why);
	if (counter && !dry_run)
		add(counter, pkt);
}

/* Counts a packet that goes to a server. It updates one counter only, because the packets of known
 * flows are counted here. */
static __always_inline void count_forwarded(__u32 server, enum lb_reason why,
					    const struct packet *pkt)
{
	struct server_counter *counter = bpf_map_lookup_elem(&server_counters, &server);
	__u32 number = why - FIRST_FORWARD;

	note_reason(why);
	if (counter && number < FORWARDS && !dry_run)
		add(&counter->forwarded[number], pkt);
}

/* Counts a server's signal. `removes`: it is remove-stickiness. */
static __always_inline void count_received_signal(__u32 server, bool removes)
{
	struct signal_counter *counter = bpf_map_lookup_elem(&server_signals, &server);

	if (!counter || dry_run)
		return;
	if (removes)
		counter->removed++;
	else
		counter->created++;
}

/* Counts an answered SYN at the server that it was offered to first; negative: that server is not
 * known. */
static __always_inline void count_answered_offer(int server)
{
	__u32 number = server;
	__u64 *answered;

	if (server < 0)
		return;
	answered = bpf_map_lookup_elem(&answered_offers, &number);
	if (answered && !dry_run)
		(*answered)++;
}

#endif
