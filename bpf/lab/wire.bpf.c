/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Makes a pair of veth interfaces behave like a wire. A packet keeps metadata of the sender's
 * kernel on its way through a veth pair. Among them is a hash of the connection. A router would
 * use this hash for ECMP, in place of a hash of the 5-tuple. But a connection gets another hash
 * after a retransmission. Resets, and acknowledgements of ended connections, have other hashes,
 * too. The router would send such packets to another balancer. On a wire this does not happen.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Makes a router that uses ECMP hash each packet itself. Attached to the router's ingress. */
SEC("tc")
int forget_hash(struct __sk_buff *skb)
{
	bpf_set_hash_invalid(skb);
	return TC_ACT_UNSPEC;
}
