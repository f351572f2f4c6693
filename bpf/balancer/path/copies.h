/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Copies of an ICMP error for all servers of its service. Routers send errors to any balancer. With
 * some placements, the bucket of a flow does not tell the flow's server. A balancer that does not
 * know the flow then cannot tell which server has to learn of the error. A server ignores an error
 * about a flow that it does not have.
 *
 * XDP cannot copy a packet. So xdp_lb leaves the error to tc_return, in a frame whose source
 * address tells the service. It is a group address, which no host has. xdp_lb drops all frames from
 * the network that have one as their source.
 */
#ifndef SEGUE_BALANCER_PATH_COPIES_H
#define SEGUE_BALANCER_PATH_COPIES_H

#include <linux/pkt_cls.h>

#include "balancer/path/encap_skb.h"
#include "net/host.h"
#include "net/token.h"
#include "balancer/place/placement.h"

/* One error becomes many packets, and anybody can forge errors. So each core copies fewer errors
 * than it answers packets. Errors beyond that go where the flow's bucket leads, as under `hash`. */
#define COPIED_PER_SECOND 100
#define COPIED_BURST 20
/* The most servers that get a copy: those with the lowest slots. */
#define MOST_COPIES 256

/* How many slots for servers there are: set at load. */
const volatile __u32 server_slots;

/* The token bucket of copied errors (net/token.h). */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} copied SEC(".maps");

/* Takes a token for copies of an error. False: the rate limit is exceeded. */
static __always_inline bool may_copy_now(void)
{
	__u32 key = 0;

	return take_token_of(bpf_map_lookup_elem(&copied, &key), 1000000000ULL / COPIED_PER_SECOND,
			     COPIED_BURST);
}

/* The first two bytes of the source address of a frame to copy, in memory order. The lowest bit of
 * the first byte makes it a group address. */
#define COPY_TAG 0x6c5f

/* Whether a frame is for this host alone, and its source is no group address. The first eight bytes
 * of a frame are compared at once: the destination, and two bytes of the source. Of these two, the
 * shift keeps only the lowest bit of the first byte, which marks a group address. */
static __always_inline bool from_host_to_host(const struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);

	return (void *)(ethernet + 1) <= frame_end(ctx) &&
	       (*(const __u64 *)ethernet ^ host_mac) << 15 == 0;
}

/* The source address of a frame to copy. */
struct copy_source {
	__u16 tag;
	__u8 encapsulation;
	__u8 pad;
	__u16 service; /* its id */
};
_Static_assert(sizeof(struct copy_source) == ETH_ALEN, "not a MAC address");
_Static_assert(MAX_SERVICES <= 1 << 16, "the id of a service has more bits");

/* Whether all servers of a service get a copy of an ICMP error of an unknown flow. A program of tc
 * makes the copies. With srv6-insert it makes none of a packet with hop-by-hop options: the routing
 * header would have to come behind these, and no program of tc reads them. */
static __always_inline bool needs_copies(const struct packet *pkt, const struct service *service)
{
	return pkt->kind == PACKET_ICMP_ERROR && !bucket_tells(service) &&
	       !(service->rule.encapsulation == ENCAP_SRV6_INSERT && pkt->hop_by_hop);
}

/* Leaves an ICMP error to tc_return. Not inlined: see handle_in_full. */
__noinline int leave_for_copies(struct xdp_md *ctx, const struct packet *pkt,
				const struct service *service)
{
	struct ethhdr *ethernet;

	if (!pkt || !service || !buckets_of(service))
		return LB_DROP_NO_SERVER;
	if (pkt->hop_limit <= 1)
		return LB_DROP_HOP_LIMIT;
	/* srv6-insert copies the IPv6 header, and decrements the hop limit as it copies. */
	if (service->rule.encapsulation != ENCAP_SRV6_INSERT && !take_hop(ctx, pkt))
		return LB_DROP_IP_HEADER;
	ethernet = frame_start(ctx);
	if ((void *)(ethernet + 1) > frame_end(ctx))
		return LB_DROP_IP_HEADER;
	*(struct copy_source *)ethernet->h_source = (struct copy_source){
		.tag = COPY_TAG,
		.encapsulation = service->rule.encapsulation,
		.service = service->id,
	};
	return LB_COPY_ICMP;
}

/* Whether xdp_lb has left a frame for copies. */
static __always_inline bool is_for_copies(struct __sk_buff *skb, struct copy_source *source)
{
	__u64 destination;

	return !skb->vlan_present && !bpf_skb_load_bytes(skb, ETH_ALEN, source, sizeof(*source)) &&
	       source->tag == COPY_TAG &&
	       !bpf_skb_load_bytes(skb, 0, &destination, sizeof(destination)) &&
	       is_host(&destination);
}

struct copying {
	struct __sk_buff *skb;
	struct packet pkt;
	struct ipv6hdr header; /* of the error, if it is IPv6 */
	__u32 service;	       /* its id */
	__u32 encapsulation;
	__u32 flow_label;
	__u32 copies; /* so far, including those that the kernel did not send */
	__u32 length; /* of the frame, without the headers of a copy */
	__u32 pad;
};

/* Removes the headers of a copy from the frame. After srv6-insert, also writes the first IPv6
 * header again. False: it failed. */
static __always_inline bool restore(struct copying *in)
{
	__u32 added = in->skb->len - in->length;

	if (!added)
		return true;
	if (bpf_skb_adjust_room(in->skb, -(__s32)added, BPF_ADJ_ROOM_MAC, 0))
		return false;
	return in->encapsulation != ENCAP_SRV6_INSERT ||
	       !bpf_skb_store_bytes(in->skb, ETH_HLEN, &in->header, sizeof(in->header), 0);
}

/* Sends a copy to a server. False: the frame is unusable for further copies. */
static __always_inline bool send_copy(struct copying *in, __u32 slot, const struct server *server)
{
	__u64 next_hop = *(volatile __u64 *)&server->next_hop;
	const struct port *port = port_at(NEXT_HOP_PORT(next_hop));
	struct segments segments = {
		.count = 1,
		.server = { slot },
		.first_server = server,
	};
	struct encap encap = {
		.pkt = &in->pkt,
		.segments = &segments,
		.server = server,
		.flow_label = in->flow_label,
		.count = 1,
	};

	if (!next_hop)
		return true;
	ask(&segments, SID_DELIVER, SID_DELIVER);
	/* There are no flags for the kernel here: with them, it would not add a second
	 * encapsulation to the same frame. */
	if (encapsulate_skb_as(in->skb, in->encapsulation, &encap, next_hop, port, 0))
		bpf_clone_redirect(in->skb, port->ifindex, 0);
	in->copies++;
	return restore(in);
}

/* Sends a copy to the server of a slot, if it is of the service. Returns 1 to end the loop. */
static long copy_to(__u32 slot, struct copying *in)
{
	const struct server *server = server_at(slot);

	if (!(server->flags & SERVER_IN_USE) || server->service != in->service)
		return 0;
	return !send_copy(in, slot, server) || in->copies >= MOST_COPIES;
}

/* Sends copies of a frame to all servers of a service, and drops the frame. */
static __always_inline int send_copies(struct __sk_buff *skb, const struct copy_source *source)
{
	struct copying in = {
		.skb = skb,
		.service = source->service,
		.encapsulation = source->encapsulation,
		.flow_label = bpf_get_hash_recalc(skb),
		.length = skb->len,
	};

	if (read_ip(skb, &in.pkt) &&
	    !bpf_skb_load_bytes(skb, ETH_HLEN, &in.header, sizeof(in.header)))
		bpf_loop(server_slots, copy_to, &in, 0);
	return TC_ACT_SHOT;
}

#endif
