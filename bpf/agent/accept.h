/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Accept policies: whether this server accepts an offered connection. Algorithms 1 and 2 of 6LB.
 * (SRLB prints the second one too, but there the attempts never accumulate.)
 */
#ifndef SEGUE_AGENT_ACCEPT_H
#define SEGUE_AGENT_ACCEPT_H

#include "maps.h"
#include "decision.h"
#include "local.h"

enum accept_policy {
	ACCEPT_ALWAYS,
	ACCEPT_NEVER,
	ACCEPT_STATIC,
	ACCEPT_DYNAMIC,
};

enum load_source {
	LOAD_CONNECTIONS = 1, /* open connections (connections.h) */
	LOAD_ACCEPT_QUEUE,    /* connections that wait in the accept queue */
	/* Loads that user space writes. The programs treat them alike. */
	LOAD_APACHE_SCOREBOARD,
	LOAD_CGROUP,
	LOAD_SHARED_MEMORY,
};

/*
 * How a TCP service accepts connections. User space replaces it as a whole. Only then does user
 * space write the state of the dynamic policy, which the programs maintain.
 */
struct acceptance {
	struct bpf_spin_lock lock;
	__u32 threshold; /* c: accepts while fewer workers than this are busy */
	__u32 attempts;	 /* in this window */
	__u32 accepted;
	__u32 window;
	__u32 few;	   /* a window with fewer accepted raises the threshold */
	__u32 many;	   /* a window with more accepted lowers it */
	__u32 capacity;	   /* n, if the source does not know it; 0: not set */
	__u64 stale_after; /* ns; for loads that user space writes */
	__u64 window_time; /* ns: the shortest time of a window; 0: none, as in the paper */
	__u64 began;	   /* ns of the coarse clock: the start of this window */
	__u8 policy;	   /* enum accept_policy */
	__u8 source;	   /* enum load_source */
	__u8 reset;	   /* the stack resets connections that no server has */
	__u8 pad[1];
	__u32 initial; /* the first threshold; shows whether the policy was changed */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct acceptance);
} acceptances SEC(".maps");

/* A service's load, as user space has read it. */
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

/* Open connections of a service: those that the server has not closed. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, __s64);
} connections SEC(".maps");

/* Whether open connections are counted on this host. */
volatile __u32 connections_counted;

/* The result of an offer: the `result` label of segue_agent_offers_total. */
enum offer {
	OFFER_ACCEPTED,
	OFFER_ACCEPTED_STALE, /* because no recent load is known */
	OFFER_REFUSED,
	OFFER_REFUSED_DOWN, /* no application listens */
	OFFER_FORCED,	    /* this server was the last candidate */

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

/* Finds the service of a flow, and sets `key` to the key of the service's entries. */
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

/* Counts the result of an offer. A dry run records it instead. */
static __always_inline void count_offer(const struct service_key *key, enum offer result)
{
	struct offers *counters;

	if (dry_run) {
		record.is_offer = true;
		record.offer = result;
		return;
	}
	counters = bpf_map_lookup_elem(&offers, key);
	if (counters && result < OFFER_COUNT)
		counters->count[result]++;
}

/* Reads the load. False when it is unknown or stale. */
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
		/* The coarse clock may be behind the clock of the timestamp. */
		return (__s64)(bpf_ktime_get_coarse_ns() - load->when) <=
		       (__s64)acceptance->stale_after;
	}
}

/* Algorithm 1, SRc. */
static __always_inline bool accept_static(__u32 threshold, const struct load *load)
{
	return load->busy < threshold;
}

/* The fields of struct acceptance that algorithm 2 changes. */
struct dynamic_state {
	__u32 threshold;
	__u32 attempts;
	__u32 accepted;
	__u64 began;
};

/* The end of algorithm 2's window: keeps the accepted share around one half. The bounds are for a
 * window with the smallest number of attempts, so the accepted ones are scaled to that number. */
static __always_inline void adapt(struct dynamic_state *state, const struct acceptance *acceptance,
				  const struct load *load, __u64 now)
{
	__u64 accepted = (__u64)state->accepted * acceptance->window;

	if (accepted < (__u64)acceptance->few * state->attempts) {
		if (state->threshold < load->capacity)
			state->threshold++;
	} else if (accepted > (__u64)acceptance->many * state->attempts && state->threshold > 0) {
		state->threshold--;
	}
	state->attempts = 0;
	state->accepted = 0;
	state->began = now;
}

/*
 * Algorithm 2, SRdyn, in the order of the paper: the new threshold decides the last attempt of a
 * window. The next window counts that attempt as accepted, but not as an attempt.
 *
 * The paper counts SYNs. A flood of SYNs would fill windows while the load does not change. Then
 * the threshold would follow the load, and half of all offers would be accepted whatever the load
 * is. So a window also lasts a shortest time, over which a flood's SYNs find the same loads as
 * others.
 */
static __always_inline bool accept_dynamic(struct acceptance *acceptance, const struct load *load)
{
	/* No helper may be called while the lock is held. */
	__u64 now = acceptance->window_time ? bpf_ktime_get_coarse_ns() : 0;
	struct dynamic_state state;
	bool accepted;

	bpf_spin_lock(&acceptance->lock);
	state.threshold = acceptance->threshold;
	state.attempts = acceptance->attempts + 1;
	state.accepted = acceptance->accepted;
	state.began = acceptance->began;
	/* Another core may have begun the window after `now`. */
	if (state.attempts >= acceptance->window &&
	    (__s64)(now - state.began) >= (__s64)acceptance->window_time)
		adapt(&state, acceptance, load, now);
	accepted = accept_static(state.threshold, load);
	if (!dry_run) {
		acceptance->threshold = state.threshold;
		acceptance->attempts = state.attempts;
		acceptance->accepted = state.accepted + accepted;
		acceptance->began = state.began;
	}
	bpf_spin_unlock(&acceptance->lock);
	return accepted;
}

/* Records the load by which the policy decides, in a dry run. */
static __always_inline void record_load(bool known, const struct load *load)
{
	if (!dry_run)
		return;
	record.asked_load = true;
	record.load_known = known;
	record.busy = load->busy;
	record.capacity = load->capacity;
}

/* Applies the policy. */
static __always_inline enum offer decide_offer(struct acceptance *acceptance,
					       const struct service_key *key,
					       const struct backlog *backlog)
{
	struct load load = {};
	bool known, accepted;

	if (acceptance->policy == ACCEPT_ALWAYS)
		return OFFER_ACCEPTED;
	if (acceptance->policy == ACCEPT_NEVER)
		return OFFER_REFUSED;
	known = read_load(acceptance, key, backlog, &load);
	record_load(known, &load);
	if (!known)
		return OFFER_ACCEPTED_STALE;
	if (acceptance->policy == ACCEPT_STATIC)
		accepted = accept_static(acceptance->threshold, &load);
	else
		accepted = accept_dynamic(acceptance, &load);
	return accepted ? OFFER_ACCEPTED : OFFER_REFUSED;
}

#endif
