/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Encapsulates packets in tc programs, with the headers that XDP writes (encap.h).
 */
#ifndef SEGUE_BALANCER_PATH_ENCAP_SKB_H
#define SEGUE_BALANCER_PATH_ENCAP_SKB_H

#include "balancer/path/encap.h"
#include "net/parse.h"

/* Reads what encapsulations need of a packet's IP header. False: the packet is too short. */
static __always_inline bool read_ip(struct __sk_buff *skb, struct packet *pkt)
{
	pkt->ethertype = skb->protocol;
	pkt->length = skb->len - ETH_HLEN;
	if (pkt->ethertype == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip __attribute__((aligned(8)));

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
			return false;
		pkt->version_class = *(__be16 *)&ip;
		pkt->hop_limit = ip.hop_limit;
		pkt->key.destination = ip.daddr;
	} else {
		struct iphdr ip __attribute__((aligned(4)));

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
			return false;
		pkt->version_class = *(__be16 *)&ip;
		pkt->hop_limit = ip.ttl;
		pkt->key.destination.s6_addr32[2] = bpf_htonl(0xffff);
		pkt->key.destination.s6_addr32[3] = ip.daddr;
	}
	return true;
}

/* Makes room for the headers as `room` says (bpf_skb_adjust_room), and writes them. False: the
 * packet is too long for the port, or the kernel has no room. */
static __always_inline bool encapsulate_skb(struct __sk_buff *skb, enum encapsulation kind,
					    struct encap *encap, __u64 next_hop,
					    const struct port *port, __u64 room)
{
	__u32 added;

	encap->size = encap_size(kind, encap);
	encap->underlay = underlay_size(kind);
	added = encap->size + encap->underlay;
	if (encap->pkt->length + added > port->mtu ||
	    bpf_skb_adjust_room(skb, added, BPF_ADJ_ROOM_MAC, room) ||
	    bpf_skb_pull_data(skb, ETH_HLEN + added + sizeof(struct iphdr)))
		return false;
	encap->end = (void *)(long)skb->data_end;
	/* The frame's context is needed for hop-by-hop options only, and these packets have
	 * none. */
	return write_all(NULL, kind, encap, (void *)(long)skb->data + ETH_HLEN) &&
	       write_ethernet(encap, next_hop, port, outer_ethertype(kind, encap));
}

/* Encapsulates a packet as encapsulate_skb does. It calls that function with a constant kind, so
 * that the sizes of headers are constants. */
static __always_inline bool encapsulate_skb_as(struct __sk_buff *skb, enum encapsulation kind,
					       struct encap *encap, __u64 next_hop,
					       const struct port *port, __u64 room)
{
	switch (kind) {
	case ENCAP_SRV6_INSERT:
		return encapsulate_skb(skb, ENCAP_SRV6_INSERT, encap, next_hop, port, room);
	case ENCAP_SRV6_ENCAP:
		return encapsulate_skb(skb, ENCAP_SRV6_ENCAP, encap, next_hop, port, room);
	case ENCAP_GRE:
		return encapsulate_skb(skb, ENCAP_GRE, encap, next_hop, port, room);
	case ENCAP_IPIP:
		return encapsulate_skb(skb, ENCAP_IPIP, encap, next_hop, port, room);
	}
	return false;
}

#endif
