/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Health checks and calls on the path of clients' packets. The balancer's process connects to the
 * VIP. The mark of its sockets names the server to check (SO_MARK), and the host routes marked
 * packets to the interface towards the servers (internal/health). XDP does not see packets that
 * the host itself sends. So tc_check encapsulates them at the egress of the interface, with the
 * headers that clients' packets to the server get. The server answers directly to the balancer's
 * address.
 *
 * The server's agent delivers the packets of a check without a decision (SID_DELIVER). A busy
 * server must not fail its checks by passing them on, and servers send no signals about checks.
 *
 * A call is a connection that the balancer offers to one server of a service that hunts, to learn
 * whether the server answers offers (internal/health/probe). The server must accept the offer. Its
 * SYN-ACK carries a signal, as for clients, and tc_return leaves it to the host (return.h).
 */
#ifndef SEGUE_BALANCER_SIGNAL_CHECK_H
#define SEGUE_BALANCER_SIGNAL_CHECK_H

#include <linux/pkt_cls.h>

#include "balancer/tables/directory.h"
#include "balancer/path/encap_skb.h"
#include "net/srv6.h"
#include "balancer/segments.h"

/* The upper half of the mark of all checks. The lower half is the server's slot. */
#define CHECK_MARK 0x5e6c
/* The upper half of the mark of all calls. The lower half is the slot of the first server. */
#define CALL_MARK 0x5e6d

/* How a server is checked. */
struct check {
	struct in6_addr vip;
	__u8 encapsulation; /* enum encapsulation */
	__u8 is_used;	    /* 0: the server is not checked, and packets to check it are dropped */
	__u8 pad[2];
	/* For calls: 1 plus the slot of the server that has to accept. The server of this element
	 * then gets the call first, and passes it on. 0: the server of this element has to
	 * accept. */
	__u32 last;
};

/* The checks of servers, by slot. Only user space writes them. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct check);
} checks SEC(".maps");

/* Whether a packet of the host opens a connection. The host sends no IPv4 options and no extension
 * headers with it. */
static __always_inline bool is_syn(const struct __sk_buff *skb, const struct packet *pkt)
{
	bool is_v6 = pkt->ethertype == bpf_htons(ETH_P_IPV6);
	__u8 flags;

	return !bpf_skb_load_bytes(
		       skb, ETH_HLEN + (is_v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr)) + 13,
		       &flags, sizeof(flags)) &&
	       flags & TCP_SYN;
}

/*
 * Lists the servers of a packet of a check or a call. The server of a check is asked to deliver it.
 * The server of a call is asked as for clients: it has to accept the SYN, and later packets are of
 * a known flow. The SYN of a call may visit another server first. That server does not have the
 * flow, so it passes the SYN on.
 */
static __always_inline void list_checked(const struct __sk_buff *skb, const struct check *check,
					 const struct packet *pkt, __u32 slot,
					 struct segments *segments)
{
	__u32 last = *(const volatile __u32 *)&check->last;
	bool is_call = skb->mark >> 16 == CALL_MARK;
	bool opens = is_call && is_syn(skb, pkt);

	go_to(segments, slot, server_at(slot));
	if (is_call && last && opens) {
		segments->server[1] = (last - 1) & (MAX_SERVERS - 1);
		segments->count = 2;
	} else if (is_call && last) {
		go_to(segments, last - 1, server_at(last - 1));
	}
	if (opens) {
		segments->columns = ALL_NO_COLUMN;
		ask(segments, SID_RECOVER, SID_CONNECT_FORCE);
	} else if (!is_call) {
		ask(segments, SID_DELIVER, SID_DELIVER);
	}
}

/* The flags that tell the kernel which headers are added, so that it can compute the checksums of
 * the inner packet if the interface cannot. There is no flag for an inserted routing header. */
static __always_inline __u64 room_flags(enum encapsulation kind, const struct server *server)
{
	__u64 outer = server->flags & SERVER_IPV4 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4
						  : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;

	if (underlay_size(kind))
		return BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP;
	switch (kind) {
	case ENCAP_SRV6_INSERT:
		return 0;
	case ENCAP_GRE:
		return outer | BPF_F_ADJ_ROOM_ENCAP_L4_GRE;
	default:
		return outer;
	}
}

/* Sends a packet of a check or a call to its server. A packet that cannot be sent is dropped. The
 * check then times out. */
static __always_inline int send_check(struct __sk_buff *skb)
{
	__u32 slot = skb->mark & (MAX_SERVERS - 1);
	const struct check *check = bpf_map_lookup_elem(&checks, &slot);
	struct segments segments = {};
	struct packet pkt = {};
	struct encap encap = {
		.pkt = &pkt,
		.segments = &segments,
		.flow_label = bpf_get_hash_recalc(skb),
	};
	const struct port *port;
	__u64 next_hop;

	if (!check || !check->is_used || !read_ip(skb, &pkt) ||
	    !same_address(&pkt.key.destination, &check->vip))
		return TC_ACT_SHOT;
	list_checked(skb, check, &pkt, slot, &segments);
	encap.server = segments.first_server;
	encap.count = segments.count;
	next_hop = *(volatile __u64 *)&encap.server->next_hop;
	port = port_at(NEXT_HOP_PORT(next_hop));
	if (!next_hop || !encapsulate_skb_as(skb, check->encapsulation, &encap, next_hop, port,
					     room_flags(check->encapsulation, encap.server)))
		return TC_ACT_SHOT;
	/* The mark was for this program. The egress of another interface must not see it. */
	skb->mark = 0;
	return port->ifindex == skb->ifindex ? TC_ACT_UNSPEC : bpf_redirect(port->ifindex, 0);
}

#endif
