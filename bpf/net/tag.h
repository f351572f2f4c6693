/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tag of a signal. It is the argument of the signal's SID, and only nodes with the key can make
 * it (docs/understand/protocol.md, "Trust").
 */
#ifndef SEGUE_NET_TAG_H
#define SEGUE_NET_TAG_H

#include "siphash.h"
#include "srv6.h"

/* The fields that a tag authenticates, in network order and without gaps, because they are
 * hashed. */
struct tagged {
	struct in6_addr client;
	struct in6_addr vip;
	__be16 client_port;
	__be16 vip_port;
	__be16 function; /* enum sid_function */
	__u16 zero;
	__u64 sender; /* the server's locator, in memory order */
	/* Low 64 bits of the server's segment, in memory order: its load report (report.h). If
	 * there is none, the message ends before it. */
	__u64 report;
};

/* A node makes tags with the first key, and accepts tags made with either. Both are the same unless
 * keys are being changed. */
#define SIGNAL_KEYS 2
struct signal_keys {
	struct siphash_key key[SIGNAL_KEYS];
};

/* Empty if the node uses no tags. An element is replaced as a whole, so readers never see half of
 * one. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct signal_keys);
} signal_keys SEC(".maps");

/* The node's keys; NULL: it uses no tags. */
static __always_inline const struct signal_keys *find_signal_keys(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&signal_keys, &first);
}

/* Returns the fields of a signal that its tag authenticates. `flow` is the key of the client's
 * packets: its source is the client. */
static __always_inline struct tagged tagged(const struct flow_key *flow, __u64 sender, __u64 report,
					    enum sid_function function)
{
	struct tagged signal = {
		.client = flow->source,
		.vip = flow->destination,
		.client_port = flow->source_port,
		.vip_port = flow->destination_port,
		.function = bpf_htons(function),
		.sender = sender,
		.report = report,
	};

	return signal;
}

/* Returns the tag of a signal: the first 48 bits of the hash, in the form of a SID's argument. The
 * hash leaves out the report if there is none. Not inlined: the verifier walks it once. */
__noinline __u64 make_tag(const struct tagged *signal, const struct siphash_key *key)
{
	const __u64 *message = (const __u64 *)signal;
	__u64 hash;

	if (!signal || !key)
		return 0;
	if (signal->report)
		hash = siphash(key, message, sizeof(*signal) / sizeof(__u64));
	else
		hash = siphash(key, message, offsetof(struct tagged, report) / sizeof(__u64));
	return hash & SID_ARGUMENT_MASK;
}

#endif
