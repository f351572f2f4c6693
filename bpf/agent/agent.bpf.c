/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The agent's data path. A packet takes these steps:
 *
 *	read the envelope -> decide -> deliver | next segment | return | answer
 *
 * Delivered packets go to the host's own stack. Packets for other hosts leave from tc ingress,
 * right behind XDP. The server's packets go straight to the client, except those that carry a
 * signal to a balancer. In SYN-ACKs the MSS is clamped.
 */
#include "maps.h"
#include "stats.h"
#include "answer_probe.h"
#include "connections.h"
#include "decap.h"
#include "decision.h"
#include "envelope.h"
#include "flow_function.h"
#include "listener.h"
#include "net/host.h"
#include "mss.h"
#include "next_segment.h"
#include "query.h"
#include "quic.h"
#include "signal.h"
#include "underlay.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* No map mentions these types. The pointer makes the compiler describe them to user space. */
const union {
	enum agent_reason reason;
	enum syn_ack syn_ack;
	enum offer offer;
	enum sent_signal signal;
	enum quic_id_result quic_id_result;
	enum accept_policy accept_policy;
	enum load_source load_source;
	enum agent_flow_state agent_flow_state;
	enum socket_kind socket_kind;
	enum listener_state listener_state;
	enum protocol_version protocol_version;
	enum probe_flag probe_flag;
	struct socket_query socket_query;
	struct load_query load_query;
	struct count_correction count_correction;
} *shared_types __attribute__((unused));

/* Decides what to do with a packet. The reason is none if the packet is to be delivered. */
static __always_inline enum agent_reason decide(struct xdp_md *ctx, const struct envelope *envelope)
{
	bool serves = is_served(envelope);

	if (dry_run && record_flow(ctx, envelope))
		record_socket(ctx);
	if (function_of(envelope) == SID_PROBE)
		return answer_probe(ctx, envelope, serves);
	if (serves) {
		if (envelope->encapsulation != ENCAP_SRV6_INSERT && !envelope->inner_fits)
			return AGENT_DROP_INNER_HEADER;
		if (is_tunneled(envelope) || function_of(envelope) == SID_DELIVER)
			return AGENT_NONE;
		return handle_flow_function(ctx, envelope);
	}
	/* This server does not have the VIP. It can only pass the packet on. */
	if (is_tunneled(envelope))
		return AGENT_PASS_OTHER_TUNNEL;
	if (is_last_server(envelope))
		return AGENT_DROP_NOT_SERVED;
	return is_balancer(envelope->sender) ? AGENT_NEXT_SEGMENT : AGENT_DROP_SENDER;
}

/* Carries out a decision: delivers the packet, passes it on, or returns it. Returns the final
 * reason. */
static __always_inline enum agent_reason
carry_out(struct xdp_md *ctx, const struct envelope *envelope, enum agent_reason decision)
{
	enum agent_reason why;

	switch (decision) {
	case AGENT_NONE:
		return deliver(ctx, envelope);
	case AGENT_DELIVER_NOT_LOCAL:
		why = deliver(ctx, envelope);
		/* Reasons before this one in the enum are no drops. */
		return why < AGENT_DROP_IP_HEADER ? decision : why;
	case AGENT_NEXT_SEGMENT:
	case AGENT_NEXT_REFUSED:
	case AGENT_NEXT_NOT_LOCAL:
	case AGENT_NEXT_RETURNED:
		return pass_on(ctx, envelope, decision);
	case AGENT_RETURN_NOT_LOCAL:
		return return_packet(ctx, envelope);
	default:
		return decision;
	}
}

/* Handles a received frame. Returns the reason under which it is counted. */
static __always_inline enum agent_reason receive(struct xdp_md *ctx)
{
	struct envelope envelope = {};
	__be16 source_port = 0; /* of the underlay */
	enum agent_reason why;

	if (underlay_port) {
		why = take_underlaid(ctx, &source_port);
		if (why)
			return why;
	}
	/* Otherwise the compiler would merge the frame's start before and after the change of the
	 * frame, as a number. */
	barrier_var(ctx);
	if (!for_host(ctx))
		return AGENT_PASS_NOT_FOR_HOST;
	if (host_is_outside && is_intruder(ctx))
		return AGENT_DROP_OUTSIDE;
	why = read_envelope(ctx, &envelope);
	if (why)
		return why;
	if (underlay_port && lacks_underlay(&envelope, source_port))
		return AGENT_DROP_OUTSIDE;
	why = carry_out(ctx, &envelope, decide(ctx, &envelope));
	if (underlay_port && leaves_again(why) && !add_underlay(ctx, source_port))
		return AGENT_DROP_REWRITE;
	return why;
}

/* Whether a packet was delivered to the service, and not only to cause a reset. */
static __always_inline bool is_delivered(enum agent_reason why)
{
	return why >= AGENT_DELIVER_SRV6_INSERT && why <= AGENT_DELIVER_IPIP;
}

/* Sees the frames that the interface receives. */
SEC("xdp")
int xdp_agent(struct xdp_md *ctx)
{
	/* A frame has at least an Ethernet header. */
	__u32 bytes = ctx->data_end - ctx->data - ETH_HLEN;
	enum agent_reason why = receive(ctx);
	/* Frames with a reason before this one in the enum pass to the kernel. */
	int verdict = why < AGENT_DROP_IP_HEADER ? XDP_PASS : XDP_DROP;

	if (dry_run) {
		record.verdict = verdict;
		record.reason = why;
	} else {
		count_frame(why, bytes);
		if (quic_is_compared && is_delivered(why))
			check_delivered_id(ctx);
	}
	return verdict;
}

/* Sends the packets that xdp_agent leaves to tc ingress: answers to probes, and packets to other
 * servers or back to the balancer. */
SEC("tc")
int tc_forward(struct __sk_buff *skb)
{
	struct ipv6hdr ip __attribute__((aligned(8))); /* SIDs are read as words */

	if (underlay_port)
		return left_in_underlay(skb) ? bpf_redirect_neigh(skb->ifindex, NULL, 0, 0)
					     : TC_ACT_UNSPEC;
	if (!read_behind_xdp(skb, &ip))
		return TC_ACT_UNSPEC;
	if (is_probe_answer(skb, &ip))
		return turn_back(skb);
	if (!left_for_next_segment(skb, &ip))
		return TC_ACT_UNSPEC;
	return bpf_redirect_neigh(skb->ifindex, NULL, 0, 0);
}

/* Sees the packets that the host sends: clamps the MSS, notes refusals, writes cookies, adds
 * signals, and compares connection IDs of QUIC. */
SEC("tc")
int tc_agent(struct __sk_buff *skb)
{
	struct sent sent = {};

	if (!read_sent(skb, &sent))
		return TC_ACT_UNSPEC;
	if (sent.flow.protocol == IPPROTO_UDP) {
		if (!skb->ingress_ifindex)
			check_issued_id(skb, &sent);
		return TC_ACT_UNSPEC;
	}
	clamp_mss(skb, &sent);
	/* A packet that the host only forwards is not the server's, whatever its source. */
	if (skb->ingress_ifindex) {
		note_forwarded(&sent);
		return TC_ACT_UNSPEC;
	}
	note_refusal(skb, &sent);
	return signal(skb, &sent);
}

/* Follows the TCP connections of the agent's network namespace. */
SEC("sockops")
int count_connections(struct bpf_sock_ops *ops)
{
	if (ops->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB && ops->op != BPF_SOCK_OPS_STATE_CB)
		return 1;
	if (bpf_get_netns_cookie(ops) != node_netns)
		return 1;
	if (ops->op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		begin_connection(ops);
	else
		follow_connection(ops);
	return 1;
}

/* Carries out a count_correction. It is not attached: user space runs it. */
SEC("xdp")
int correct_connections(struct xdp_md *ctx)
{
	const struct count_correction *correction = frame_start(ctx);

	if ((void *)(correction + 1) > frame_end(ctx))
		return XDP_DROP;
	correct_count(correction);
	return XDP_PASS;
}

/* Answers a load_query. It is not attached: user space runs it. */
SEC("xdp")
int query_load(struct xdp_md *ctx)
{
	struct load_query *query = frame_start(ctx);

	if ((void *)(query + 1) > frame_end(ctx))
		return XDP_DROP;
	answer_load_query(query);
	return XDP_PASS;
}

/* Answers a socket_query. It is not attached: user space runs it. */
SEC("xdp")
int query_socket(struct xdp_md *ctx)
{
	struct socket_query *query = frame_start(ctx);

	if ((void *)(query + 1) > frame_end(ctx))
		return XDP_DROP;
	answer_query(ctx, query);
	return XDP_PASS;
}
