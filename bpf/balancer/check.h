/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Health checks on the path of clients' packets. The balancer's process connects to the VIP. The
 * mark of its sockets names the server to check (SO_MARK), and the host routes marked packets to
 * the interface towards the servers (internal/checkpath). XDP does not see packets that the host
 * itself sends. So tc_check encapsulates them at the egress of the interface, with the headers that
 * clients' packets to the server get. The server answers directly to the balancer's address.
 *
 * The server's agent delivers the packets of a check without a decision (SID_DELIVER). A busy
 * server must not fail its checks by passing them on, and servers send no signals about checks.
 */
#ifndef SEGUE_BALANCER_CHECK_H
#define SEGUE_BALANCER_CHECK_H

#include <linux/pkt_cls.h>

#include "directory.h"
#include "encap_skb.h"
#include "net/srv6.h"
#include "segments.h"

/* The upper half of the mark of all checks. The lower half is the server's slot. */
#define CHECK_MARK 0x5e6c

/* How a server is checked. */
struct check {
	struct in6_addr vip;
	__u8 encapsulation; /* enum encapsulation */
	__u8 is_used;	    /* 0: the server is not checked, and its checks are dropped */
	__u8 pad[6];
};

/* By slot. Only user space writes it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: as servers */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct check);
} checks SEC(".maps");

/* Tells the kernel which headers are added, so that it can compute the checksums of the inner
 * packet if the interface cannot. The kernel has no name for an inserted routing header. */
static __always_inline __u64 kind_of_room(enum encapsulation kind, const struct server *server)
{
	__u64 outer = server->flags & SERVER_IPV4 ? BPF_F_ADJ_ROOM_ENCAP_L3_IPV4
						  : BPF_F_ADJ_ROOM_ENCAP_L3_IPV6;

	switch (kind) {
	case ENCAP_SRV6_INSERT:
		return 0;
	case ENCAP_GRE:
		return outer | BPF_F_ADJ_ROOM_ENCAP_L4_GRE;
	default:
		return outer;
	}
}

/* Sends a packet of a check to its server. A packet that cannot be sent is dropped: the check then
 * times out. */
static __always_inline int send_check(struct __sk_buff *skb)
{
	__u32 slot = skb->mark & (MAX_SERVERS - 1);
	const struct check *check = bpf_map_lookup_elem(&checks, &slot);
	const struct server *server = server_at(slot);
	__u64 next_hop = *(volatile __u64 *)&server->next_hop;
	const struct port *port = port_at(NEXT_HOP_PORT(next_hop));
	struct segments segments = {
		.count = 1,
		.server = { slot },
		.first_server = server,
	};
	struct packet pkt = {};
	struct encap encap = {
		.pkt = &pkt,
		.segments = &segments,
		.server = server,
		.flow_label = bpf_get_hash_recalc(skb),
		.count = 1,
	};

	if (!check || !check->is_used || !next_hop || !read_ip(skb, &pkt) ||
	    !same_address(&pkt.key.destination, &check->vip))
		return TC_ACT_SHOT;
	ask(&segments, SID_DELIVER, SID_DELIVER);
	if (!encapsulate_skb_as(skb, check->encapsulation, &encap, next_hop, port,
				kind_of_room(check->encapsulation, server)))
		return TC_ACT_SHOT;
	/* The mark was for this program. The egress of another interface must not see it. */
	skb->mark = 0;
	return port->ifindex == skb->ifindex ? TC_ACT_UNSPEC : bpf_redirect(port->ifindex, 0);
}

#endif
