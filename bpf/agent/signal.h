/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Signals to the balancer: the right half of 6LB's table III. A signal is a header around a packet
 * that the server sends to the client anyway. The packet goes to the balancer, which removes the
 * header and sends the packet on to the client.
 */
#ifndef SEGUE_AGENT_SIGNAL_H
#define SEGUE_AGENT_SIGNAL_H

#include <linux/pkt_cls.h>

#include "flows.h"
#include "load.h"
#include "stamp.h"
#include "stats.h"
#include "sent.h"
#include "net/tag.h"
#include "net/underlay.h"

/* How long after the SYN a signal reports the load that the first candidate told. */
#define FIRST_LIFETIME 250000000ULL /* ns */

/* The MTU of the path to the balancers, in bytes of layer 3. */
volatile __u32 signal_mtu;

/* An IPv6 packet with an inserted signal, up to the TCP header. The packet travels from the server
 * to the balancer and on to the client. */
struct inserted_signal {
	struct ipv6hdr ip;
	__u64 srh; /* struct segment_routing_header without its list */
	struct in6_addr segment[3];
};

/* Bytes that a signal adds to a packet of the flow. */
static __always_inline __u32 signal_size(const struct agent_flow *flow)
{
	if (flow->encapsulation == ENCAP_SRV6_INSERT)
		return srh_size(3);
	return sizeof(struct ipv6hdr) + (underlay_port ? UNDERLAY_SIZE : 0);
}

/*
 * Whether the packet has room for a signal. A packet that the interface segments (TSO) would carry
 * the signal in each segment. A packet that exceeds the MTU with the signal would be lost.
 * Balancers do not accept fragmented signals.
 */
static __always_inline bool can_signal(const struct __sk_buff *skb, const struct sent *sent,
				       const struct agent_flow *flow)
{
	return !skb->gso_size && !sent->is_fragment &&
	       skb->len - ETH_HLEN + signal_size(flow) <= signal_mtu;
}

/* The low 64 bits of a signal's SID: the function, and a tag if the node has a key. */
static __always_inline __u64 signal_sid_low(const struct flow_key *flow, __u64 report,
					    enum sid_function function)
{
	const struct signal_keys *keys = find_signal_keys();
	struct tagged tagged_signal;

	if (!keys)
		return SID_LOW(function);
	tagged_signal = tagged(flow, node_locator, report, function);
	return SID_LOW(function) | make_tag(&tagged_signal, &keys->key[0]) << SID_ARGUMENT_SHIFT;
}

/* Writes the SID of a signal: the locator of the flow's balancer, and these low 64 bits. */
static __always_inline void write_signal_sid(struct in6_addr *sid, const struct agent_flow *flow,
					     __u64 sid_low)
{
	((__u64 *)sid)[0] = flow->balancer;
	((__u64 *)sid)[1] = sid_low;
}

/* Writes the node's own segment, with its load report. */
static __always_inline void write_node(struct in6_addr *address, __u64 report)
{
	((__u64 *)address)[0] = node_locator;
	((__u64 *)address)[1] = report;
}

/* Inserts a signal as a routing header behind the IPv6 header. False: it failed, and the packet
 * must be dropped. */
static __always_inline bool insert_signal(struct __sk_buff *skb, const struct agent_flow *flow,
					  __u64 sid_low, __u64 report)
{
	struct inserted_signal header = {};
	struct segment_routing_header *srh = (void *)&header.srh;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN, &header.ip, sizeof(header.ip)))
		return false;
	srh->next_header = header.ip.nexthdr;
	srh->length = srh_size(3) / 8 - 1;
	srh->type = ROUTING_TYPE_SRH;
	srh->segments_left = 1;
	srh->last_entry = 2;
	header.segment[0] = header.ip.daddr;
	write_signal_sid(&header.segment[1], flow, sid_low);
	write_node(&header.segment[2], report);
	header.ip.nexthdr = IPPROTO_ROUTING;
	header.ip.payload_len = bpf_htons(bpf_ntohs(header.ip.payload_len) + srh_size(3));
	header.ip.daddr = header.segment[1];
	return !bpf_skb_adjust_room(skb, srh_size(3), BPF_ADJ_ROOM_NET, 0) &&
	       !bpf_skb_store_bytes(skb, ETH_HLEN, &header, sizeof(header), 0);
}

/* Makes room for a signal's headers, and writes them. */
static __always_inline bool put_signal(struct __sk_buff *skb, const struct ipv6hdr *ip)
{
	__be16 ethertype = bpf_htons(ETH_P_IPV6);

	return !bpf_skb_adjust_room(skb, sizeof(*ip), BPF_ADJ_ROOM_MAC,
				    BPF_F_ADJ_ROOM_ENCAP_L3_IPV6) &&
	       !bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &ethertype,
				    sizeof(ethertype), 0) &&
	       !bpf_skb_store_bytes(skb, ETH_HLEN, ip, sizeof(*ip), 0);
}

/* The same with the underlay in front of the headers. */
static __always_inline bool put_underlaid_signal(struct __sk_buff *skb, const struct ipv6hdr *ip)
{
	struct {
		struct underlay_header outer;
		struct ipv6hdr ip;
	} headers;
	__be16 ethertype = bpf_htons(ETH_P_IP);
	__u64 to = *(const __u64 *)&ip->daddr;

	headers.ip = *ip;
	write_underlay(&headers.outer, node_locator, to, ipv6_traffic_class(ip),
		       sizeof(*ip) + bpf_ntohs(ip->payload_len),
		       underlay_source_port(bpf_get_hash_recalc(skb)));
	return !bpf_skb_adjust_room(skb, sizeof(headers), BPF_ADJ_ROOM_MAC,
				    BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP) &&
	       !bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &ethertype,
				    sizeof(ethertype), 0) &&
	       !bpf_skb_store_bytes(skb, ETH_HLEN, &headers, sizeof(headers), 0);
}

/* Puts an outer IPv6 header with a signal around the packet. It has a flow label of the flow (RFC
 * 6438), and the packet's traffic class (RFC 2983, RFC 6040). False: it
 * failed, and the packet must be dropped. */
static __always_inline bool wrap_signal(struct __sk_buff *skb, const struct sent *sent,
					const struct agent_flow *flow, __u64 sid_low, __u64 report)
{
	bool is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	struct ipv6hdr ip __attribute__((aligned(8))) = {}; /* SIDs are written as words */

	*(__be32 *)&ip = (sent->version_class_label & bpf_htonl(0xfff00000)) |
			 bpf_htonl(bpf_get_hash_recalc(skb) & 0xfffff);
	ip.payload_len = bpf_htons(skb->len - ETH_HLEN);
	ip.nexthdr = is_v4 ? IPPROTO_IPIP : IPPROTO_IPV6;
	ip.hop_limit = OUTER_HOP_LIMIT;
	write_node(&ip.saddr, report);
	write_signal_sid(&ip.daddr, flow, sid_low);
	return underlay_port ? put_underlaid_signal(skb, &ip) : put_signal(skb, &ip);
}

/* Whether a signal still reports the first candidate, because the flow was entered recently. The
 * signal of a repeated SYN-ACK does not. */
static __always_inline bool is_first_recent(const struct agent_flow *flow)
{
	return agent_flow_age(flow) < FIRST_LIFETIME;
}

/* The code of this server's present load; 0: it is unknown. In remove-stickiness, the ending
 * connection does not count, although the load that user space has read contains it. */
static __always_inline __u8 own_load_code(struct __sk_buff *skb, const struct sent *sent,
					  enum sid_function function)
{
	struct backlog backlog = {};
	struct service_key key __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	const struct acceptance *acceptance = find_acceptance(&sent->flow, &key);
	struct load load = {};

	if (!acceptance || !is_listening(skb, &sent->flow, &backlog) ||
	    !load_now(acceptance, &key, &backlog, &load))
		return 0;
	if (function == SID_REMOVE && load.busy && shows_ending(acceptance->source))
		load.busy--;
	return load_code(told_load(&load));
}

/* The report for a signal of a flow, as the low 64 bits of this server's segment; 0: none. Not
 * inlined: the verifier walks it once. */
__noinline __u64 report_of(struct __sk_buff *skb, const struct sent *sent,
			   const struct agent_flow *flow, __u32 function)
{
	__u64 report;

	if (!sent || !flow || !flow->wants_report)
		return 0;
	report = (__u64)serial_now() << REPORT_SERIAL_SHIFT |
		 (__u64)own_load_code(skb, sent, function) << REPORT_LOAD_SHIFT;
	if (function == SID_CREATE && is_first_recent(flow))
		report |= flow->first & REPORT_FIRST_MASK;
	else
		report |= REPORT_NO_COLUMN;
	return bpf_cpu_to_be64(report);
}

/* The signal for the packet; SID_HOST: none. A packet with FIN or RST signals the end. If it has no
 * room for the signal, the next packet signals the end. The end is signalled once. A repeated FIN
 * or RST goes straight to the client, because the first one may have been lost with the balancer.
 * Before the end, each packet of a flow that waits signals that this server has accepted it. */
static __always_inline enum sid_function signal_of(const struct sent *sent,
						   const struct agent_flow *flow)
{
	if (flow->told)
		return SID_HOST;
	if (sent->tcp_flags & (TCP_FIN | TCP_RST) || flow->state == AGENT_FLOW_ENDING)
		return SID_REMOVE;
	return flow->state == AGENT_FLOW_WAIT ? SID_CREATE : SID_HOST;
}

/* Changes the entry of a flow whose packet carries a signal, or would if it had room (`fits`).
 * After remove-stickiness, the flow is closing; without room, it is ending, and its next packet
 * tries again. After create-stickiness, a flow without a cookie waits on, until the balancer says
 * that it knows the flow. The balancer of a flow with a cookie may keep no state, and never say so.
 * So the entry of such a flow waits no longer, until a recover-stickiness asks again. The
 * cookie takes the place of what a report says about the first candidate. */
static __always_inline void note_signal(struct local_flow *flow, enum sid_function function,
					bool fits, __u8 cookie)
{
	if (function == SID_REMOVE) {
		flow->entry.state = fits ? AGENT_FLOW_CLOSING : AGENT_FLOW_ENDING;
		flow->entry.told = fits;
	} else if (cookie && fits) {
		flow->entry.state = AGENT_FLOW_COOKIE;
		flow->entry.told = true;
		flow->entry.first = cookie;
	} else {
		return;
	}
	agent_flow_put(&flow->place, &flow->entry);
}

/* Adds a signal to the packet, if there is one to send and the packet has room, and sends it to the
 * balancer. Any other packet goes straight to the client (TC_ACT_UNSPEC). The packet also gets the
 * cookie of its flow, even if the flow's entry has none: anybody can send a packet without a
 * cookie, which overwrites the entry. */
static __always_inline int signal(struct __sk_buff *skb, const struct sent *sent)
{
	enum sid_function function;
	struct local_flow found;
	struct agent_flow flow;
	__u64 sid_low, report;
	__u8 cookie = 0;
	bool fits;

	find_agent_flow(&sent->flow, &found);
	if (are_cookies_used())
		cookie = stamp_cookie(skb, sent, &found.entry);
	if (!is_entered(&found) || found.entry.state == AGENT_FLOW_COOKIE)
		return TC_ACT_UNSPEC;
	flow = found.entry;
	function = signal_of(sent, &flow);
	if (function == SID_HOST)
		return TC_ACT_UNSPEC;
	fits = can_signal(skb, sent, &flow);
	note_signal(&found, function, fits, cookie);
	if (!fits) {
		count_sent_signal(SENT_TOO_LONG);
		return TC_ACT_UNSPEC;
	}
	report = report_of(skb, sent, &flow, function);
	sid_low = signal_sid_low(&sent->flow, report, function);
	if (!(flow.encapsulation == ENCAP_SRV6_INSERT
		      ? insert_signal(skb, &flow, sid_low, report)
		      : wrap_signal(skb, sent, &flow, sid_low, report))) {
		count_sent_signal(SENT_FAILED);
		return TC_ACT_SHOT;
	}
	count_sent_signal(function == SID_CREATE ? SENT_CREATE : SENT_REMOVE);
	/* The balancer's next hop may differ from the client's. */
	return bpf_redirect_neigh(skb->ifindex, NULL, 0, 0);
}

#endif
