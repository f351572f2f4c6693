/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Makes a pair of veth interfaces a wire. What is sent by one end keeps at the other
 * what its sender's kernel knows of it, among that a hash of the connection, which a
 * router then takes for the 5-tuple's in ECMP. But connections have other hashes once
 * they retransmit, and in a reset or an acknowledgement of a connection that is over:
 * those would go to another balancer, which on a wire they never do.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* At the ingress of a router that spreads packets. */
SEC("tc")
int forget_hash(struct __sk_buff *skb)
{
	bpf_set_hash_invalid(skb);
	return TC_ACT_UNSPEC;
}
