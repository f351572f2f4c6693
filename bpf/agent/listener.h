/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether the application of a TCP service has stopped listening, so that the host refuses clients.
 * The answers to probes tell balancers (answer_probe.h).
 *
 * Clients must not be able to take a healthy server out of use. So three things must hold, and a
 * client can cause the second one only:
 *
 *	1. The answer to an earlier probe has found a socket that listens on the service's port.
 *	2. Since then, the host has sent the reset that refuses a SYN, or the agent has passed on or
 *	   handed back an offered connection because no socket listens.
 *	3. The answer to the present probe finds no socket that listens.
 *
 * Some hosts pass connections on to another network namespace or host, for example by address
 * translation. Such a host never listens itself. Without the first two conditions, it would seem to
 * refuse clients.
 */
#ifndef SEGUE_AGENT_LISTENER_H
#define SEGUE_AGENT_LISTENER_H

#include "decision.h"
#include "local.h"
#include "maps.h"
#include "sent.h"

enum listener_state {
	LISTENER_SEEN = 1,  /* the answer to a probe has found a socket that listens */
	LISTENER_REFUSED,   /* since then, the host has refused a connection */
	LISTENER_ELSEWHERE, /* the host passes connections on: it has forwarded a SYN-ACK */
};

/* The state of each TCP service of one port whose application has listened, on this host or in a
 * container to which the host forwards. The state is kept across restarts. User space deletes
 * services that are no longer configured. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, __u32); /* enum listener_state */
} listeners SEC(".maps");

/* Whether the application of the service has stopped listening, and refuses connections. Not
 * inlined, because of the size of its stack. */
__noinline int is_refusing(struct xdp_md *ctx, const struct in6_addr *vip, __be16 port)
{
	struct flow_key flow __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	struct service_key key __attribute__((aligned(8))) = {};
	__u32 seen = LISTENER_SEEN;
	struct backlog backlog = {};
	const __u32 *state;

	if (!vip || !port)
		return false;
	copy_address(&flow.destination, vip);
	flow.destination_port = port;
	copy_address(&key.vip, vip);
	key.port = port;
	key.protocol = IPPROTO_TCP;
	if (!bpf_map_lookup_elem(&segment_sizes, &key))
		return false; /* not a service, or a service of all ports */
	state = bpf_map_lookup_elem(&listeners, &key);
	if (!is_listening(ctx, &flow, &backlog))
		return state && *state == LISTENER_REFUSED;
	if (!dry_run && (!state || *state != LISTENER_SEEN))
		bpf_map_update_elem(&listeners, &key, &seen, BPF_ANY);
	return false;
}

/* Whether the packet refuses a SYN: it is a reset in answer to a segment without an acknowledgement
 * (RFC 9293 section 3.5.2, group 1). A socket that listens sends no such reset. */
static __always_inline bool is_refusal(const struct __sk_buff *skb, const struct sent *sent)
{
	const __u8 flags = TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK;
	__be32 sequence;

	return (sent->tcp_flags & flags) == (TCP_RST | TCP_ACK) &&
	       !bpf_skb_load_bytes(skb, sent->transport + offsetof(struct tcphdr, seq), &sequence,
				   sizeof(sequence)) &&
	       !sequence;
}

/* Sets `key` to the service of a flow, and returns the state of its listener. Services of UDP have
 * none. */
static __always_inline __u32 *find_listener(const struct flow_key *flow, struct service_key *key)
{
	copy_address(&key->vip, &flow->destination);
	key->port = flow->destination_port;
	key->protocol = flow->protocol;
	return bpf_map_lookup_elem(&listeners, key);
}

/* Notes that a connection is refused. Nothing is noted if no application has listened here. */
static __always_inline void set_refused(const struct flow_key *flow)
{
	struct service_key key __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	__u32 *state = find_listener(flow, &key);

	if (state && *state == LISTENER_SEEN)
		*(volatile __u32 *)state = LISTENER_REFUSED;
}

/* Notes a packet of this host, if the packet is a reset that refuses a connection. A host that
 * resets the connections of a service forwards them no longer. So the state LISTENER_ELSEWHERE is
 * removed. */
static __always_inline void note_refusal(const struct __sk_buff *skb, const struct sent *sent)
{
	struct service_key key __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	const __u32 *state;

	if (!is_refusal(skb, sent))
		return;
	set_refused(&sent->flow);
	state = find_listener(&sent->flow, &key);
	if (state && *state == LISTENER_ELSEWHERE)
		bpf_map_delete_elem(&listeners, &key);
}

/* Notes a packet that the host forwards, if it is a SYN-ACK of a service: the host passes the
 * service's connections on, for example to a container. Even if an application has listened here
 * before, the service then does not count as refusing, until a probe finds a socket that listens
 * here. */
static __always_inline void note_forwarded(const struct sent *sent)
{
	const __u8 flags = TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK;
	struct service_key key __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	__u32 elsewhere = LISTENER_ELSEWHERE;
	const __u32 *state;

	if ((sent->tcp_flags & flags) != (TCP_SYN | TCP_ACK))
		return;
	state = find_listener(&sent->flow, &key);
	if (state && *state == LISTENER_ELSEWHERE)
		return;
	/* Without a state, the packet may be of no service. */
	if (state || bpf_map_lookup_elem(&segment_sizes, &key))
		bpf_map_update_elem(&listeners, &key, &elsewhere, BPF_ANY);
}

#endif
