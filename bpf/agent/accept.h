/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether this server wants a connection that it is offered: algorithms 1 and 2 of 6LB.
 * (SRLB prints the second one too, but there the attempts never accumulate.)
 */
#ifndef SEGUE_AGENT_ACCEPT_H
#define SEGUE_AGENT_ACCEPT_H

#include "maps.h"
#include "local.h"

enum accept_policy {
	ACCEPT_ALWAYS,
	ACCEPT_NEVER,
	ACCEPT_STATIC,
	ACCEPT_DYNAMIC,
};

enum load_source {
	LOAD_CONNECTIONS = 1, /* those that are open (connections.h) */
	LOAD_ACCEPT_QUEUE,    /* those that wait for the application */
	/* User space writes these; here they are all the same. */
	LOAD_APACHE_SCOREBOARD,
	LOAD_CGROUP,
	LOAD_SHARED_MEMORY,
};

/*
 * How a TCP service takes connections. User space replaces it as a whole, and with it
 * the state of the dynamic policy, which else is the programs' own.
 */
struct acceptance {
	struct bpf_spin_lock lock;
	__u32 threshold; /* c: takes a connection while fewer than this are busy */
	__u32 attempts;	 /* of this window */
	__u32 accepted;
	__u32 window;
	__u32 few;	   /* fewer accepted than this in a window raise the threshold */
	__u32 many;	   /* more than this lower it */
	__u32 capacity;	   /* n, where the source does not know it; 0: none */
	__u64 stale_after; /* ns; of a load that user space writes */
	__u8 policy;	   /* enum accept_policy */
	__u8 source;	   /* enum load_source */
	__u8 reset;	   /* what is not here goes to the stack, which resets it */
	__u8 pad[1];
	__u32 initial; /* threshold at first; kept to tell whether the rule has changed */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct acceptance);
} acceptances SEC(".maps");

/* What user space read of a service's load. */
struct load {
	__u32 busy;
	__u32 capacity;
	__u64 when; /* ns of the monotonic clock; 0: never */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct load);
} loads SEC(".maps");

/* The connections of a service that the server has not closed. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, __s64);
} connections SEC(".maps");

/* Whether they are counted on this host. */
volatile __u32 connections_counted;

/* What became of a connection that was offered: the `result` label of
 * segue_agent_offers_total. */
enum offer {
	OFFER_ACCEPTED,
	OFFER_ACCEPTED_STALE, /* for want of a load to decide by */
	OFFER_REFUSED,
	OFFER_REFUSED_DOWN, /* no application listens */
	OFFER_FORCED,	    /* there was nobody else */

	OFFER_COUNT,
};

struct offers {
	__u64 count[OFFER_COUNT];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct offers);
} offers SEC(".maps");

/* Finds the service of a flow, and makes `key` that of its entries. */
static __always_inline struct acceptance *find_acceptance(const struct flow_key *flow,
							  struct service_key *key)
{
	struct acceptance *acceptance;

	copy_address(&key->vip, &flow->destination);
	key->port = flow->destination_port;
	key->protocol = IPPROTO_TCP;
	acceptance = bpf_map_lookup_elem(&acceptances, key);
	if (acceptance)
		return acceptance;
	key->port = 0;
	return bpf_map_lookup_elem(&acceptances, key);
}

static __always_inline void count_offer(const struct service_key *key, enum offer result)
{
	struct offers *counters = bpf_map_lookup_elem(&offers, key);

	if (counters && result < OFFER_COUNT)
		counters->count[result]++;
}

/* False when nothing is known of the load, or it is too old to go by. */
static __always_inline bool read_load(const struct acceptance *acceptance,
				      const struct service_key *key, const struct backlog *backlog,
				      struct load *load)
{
	const struct load *reported;
	const __s64 *count;

	load->capacity = acceptance->capacity;
	switch (acceptance->source) {
	case LOAD_CONNECTIONS:
		count = bpf_map_lookup_elem(&connections, key);
		load->busy = count && *count > 0 ? *count : 0;
		return connections_counted;
	case LOAD_ACCEPT_QUEUE:
		load->busy = backlog->waiting;
		load->capacity = backlog->most;
		return true;
	default:
		reported = bpf_map_lookup_elem(&loads, key);
		if (!reported || !reported->when)
			return false;
		*load = *reported;
		/* The coarse clock may be behind the one that the load was stamped by. */
		return (__s64)(bpf_ktime_get_coarse_ns() - load->when) <=
		       (__s64)acceptance->stale_after;
	}
}

/* Algorithm 1, SRc. */
static __always_inline bool accept_static(const struct acceptance *acceptance,
					  const struct load *load)
{
	return load->busy < acceptance->threshold;
}

/* The end of algorithm 2's window: keep the share that is accepted around one half. */
static __always_inline void adapt(struct acceptance *acceptance, const struct load *load)
{
	if (acceptance->accepted < acceptance->few) {
		if (acceptance->threshold < load->capacity)
			acceptance->threshold++;
	} else if (acceptance->accepted > acceptance->many && acceptance->threshold > 0) {
		acceptance->threshold--;
	}
	acceptance->attempts = 0;
	acceptance->accepted = 0;
}

/* Algorithm 2, SRdyn, in its order: the last attempt of a window is decided by the new
 * threshold, and counted in the next one as accepted, though not as an attempt. */
static __always_inline bool accept_dynamic(struct acceptance *acceptance, const struct load *load)
{
	bool accepted;

	bpf_spin_lock(&acceptance->lock);
	acceptance->attempts++;
	if (acceptance->attempts == acceptance->window)
		adapt(acceptance, load);
	accepted = accept_static(acceptance, load);
	if (accepted)
		acceptance->accepted++;
	bpf_spin_unlock(&acceptance->lock);
	return accepted;
}

/* Asks the policy. */
static __always_inline enum offer decide_offer(struct acceptance *acceptance,
					       const struct service_key *key,
					       const struct backlog *backlog)
{
	struct load load = {};
	bool accepted;

	if (acceptance->policy == ACCEPT_ALWAYS)
		return OFFER_ACCEPTED;
	if (acceptance->policy == ACCEPT_NEVER)
		return OFFER_REFUSED;
	if (!read_load(acceptance, key, backlog, &load))
		return OFFER_ACCEPTED_STALE;
	if (acceptance->policy == ACCEPT_STATIC)
		accepted = accept_static(acceptance, &load);
	else
		accepted = accept_dynamic(acceptance, &load);
	return accepted ? OFFER_ACCEPTED : OFFER_REFUSED;
}

#endif
