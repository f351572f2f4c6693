/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Impairs the packets that the lab's switch forwards between hosts: drops them, sends them twice,
 * or lets later packets overtake them. A program can drop and copy a packet, but cannot keep it.
 * So a packet that is to be overtaken goes to user space and back, through a TAP interface
 * (lab/delay.go). A VLAN tag contains the port that the packet leaves by when it comes back.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/pkt_cls.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAX_PORTS 256
#define VID_BITS 12 /* a port's number must fit in a VLAN ID */
#define VID_MASK ((1 << VID_BITS) - 1)
#define DONE 0x5e60e /* mark of packets that were processed here already */

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* A port of the switch, with counters of the packets to this port. */
struct port {
	__u64 packets; /* packets from or to an impaired port */
	__u64 dropped;
	__u64 duplicated;
	__u64 reordered; /* sent to the TAP interface */
	__u64 returned;	 /* packets of `reordered` that came back */
	__u32 impaired;	 /* the impairment also applies to packets from this port */
	__u32 padding;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u32); /* interface index */
	__type(value, struct port);
	__uint(max_entries, MAX_PORTS);
} ports SEC(".maps");

/* Limits for a random number of 32 bits. The impairment is that of the first limit that is larger
 * than the number. */
const volatile __u64 drop_below;
const volatile __u64 duplicate_below;
const volatile __u64 reorder_below;
const volatile __u64 seed;
const volatile __u32 delay; /* index of the TAP interface */

/* A random number for the nth packet to a port. It is the same in each run: SplitMix64 (Steele,
 * Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014, figure 17), with the
 * packet's number in place of the generator's state. */
static __always_inline __u32 chance(__u32 port, __u64 n)
{
	__u64 z = seed + (n << VID_BITS | port) * 0x9e3779b97f4a7c15;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return (z ^ z >> 31) >> 32;
}

/* Impairs a random part of the packets from or to impaired ports. Attached to the egress of each
 * port. */
SEC("tc")
int impair(struct __sk_buff *skb)
{
	__u32 to = skb->ifindex, from = skb->ingress_ifindex;
	struct port *port = bpf_map_lookup_elem(&ports, &to);
	struct port *origin = bpf_map_lookup_elem(&ports, &from);
	__u32 chosen;

	if (skb->mark == DONE || !port || !origin || !(port->impaired || origin->impaired))
		return TC_ACT_OK;
	chosen = chance(to, __sync_fetch_and_add(&port->packets, 1));
	skb->mark = DONE;
	if (chosen < drop_below) {
		__sync_fetch_and_add(&port->dropped, 1);
		return TC_ACT_SHOT;
	}
	if (chosen < duplicate_below) {
		if (!bpf_clone_redirect(skb, to, 0))
			__sync_fetch_and_add(&port->duplicated, 1);
		return TC_ACT_OK;
	}
	if (chosen >= reorder_below || bpf_skb_vlan_push(skb, bpf_htons(ETH_P_8021AD), to))
		return TC_ACT_OK;
	__sync_fetch_and_add(&port->reordered, 1);
	return bpf_redirect(delay, 0);
}

/* Sends a packet that comes back from user space out by its port. Attached to the ingress of the
 * TAP interface. */
SEC("tc")
int give_back(struct __sk_buff *skb)
{
	__u32 to = skb->vlan_tci & VID_MASK;
	struct port *port = bpf_map_lookup_elem(&ports, &to);

	/* Multicast packets that the kernel itself sends on the TAP interface have no tag. */
	if (!skb->vlan_present || !port || bpf_skb_vlan_pop(skb))
		return TC_ACT_SHOT;
	__sync_fetch_and_add(&port->returned, 1);
	skb->mark = DONE;
	return bpf_redirect(to, 0);
}
