/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Types that the programs of balancer and agent share with each other and with user space. Padding
 * is explicit everywhere.
 */
#ifndef SEGUE_NET_TYPES_H
#define SEGUE_NET_TYPES_H

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/in6.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

/*
 * IPv4 addresses are held in their IPv4-mapped form (RFC 4291 section 2.5.5.2),
 * so that one key, one hash and one table serve both families.
 */
struct flow_key {
	struct in6_addr source;
	struct in6_addr destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 pad[3];
} __attribute__((aligned(8)));

enum encapsulation {
	ENCAP_SRV6_INSERT,
	ENCAP_SRV6_ENCAP,
	ENCAP_GRE,
	ENCAP_IPIP,
};

#define NAME_SIZE 64 /* of a service's or server's name, with its final zero */

struct counter {
	__u64 packets;
	__u64 bytes; /* of layer 3, as received */
};

#endif
