/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Sends a server's packet on to the client. This runs at tc ingress, behind XDP: here the kernel
 * finds the next hop, and holds the packet until the neighbour is resolved. In XDP the neighbour
 * would have to be resolved already, and the host would have to be a router (agent/next_segment.h).
 */
#ifndef SEGUE_BALANCER_SIGNAL_RETURN_H
#define SEGUE_BALANCER_SIGNAL_RETURN_H

#include <linux/pkt_cls.h>

#include "net/host.h"
#include "net/parse.h"

/* The index of the interface towards clients, whichever interface this program is on. */
volatile __u32 host_client_interface;

/* The host's own addresses. The helper that looks up routes cannot tell them: it refuses on a host
 * that does not forward. */
#define MAX_OWN_ADDRESSES 16384
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_OWN_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, __u8);
} own_addresses SEC(".maps");

/* Whether a packet is for the host itself: a client on the balancer's host has opened the
 * connection. */
static __always_inline bool is_for_own_client(struct __sk_buff *skb)
{
	struct in6_addr client;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		__be32 address;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, daddr), &address,
				       sizeof(address)))
			return false;
		map_ipv4(&client, address);
	} else if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, daddr), &client,
				      sizeof(client))) {
		return false;
	}
	return bpf_map_lookup_elem(&own_addresses, &client);
}

/* Sends the packet out by the interface towards clients, or up the host's own stack. */
static __always_inline int send_to_client(struct __sk_buff *skb)
{
	if (is_for_own_client(skb))
		return TC_ACT_UNSPEC;
	return bpf_redirect_neigh(host_client_interface, NULL, 0, 0);
}

#endif
