/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tables of services that balancers offer connections to: the accept policy, the load, and the
 * results of offers.
 */
#ifndef SEGUE_AGENT_SERVICE_H
#define SEGUE_AGENT_SERVICE_H

#include "maps.h"

enum accept_policy {
	ACCEPT_ALWAYS,
	ACCEPT_NEVER,
	ACCEPT_STATIC,
	ACCEPT_DYNAMIC,
	ACCEPT_LEAST,	/* least.h */
	ACCEPT_DRAINED, /* not from a configuration file: the service is drained */
};

enum load_source {
	LOAD_CONNECTIONS = 1, /* open connections (connections.h) */
	LOAD_ACCEPT_QUEUE,    /* connections that wait in the accept queue */
	/* Loads that user space writes. */
	LOAD_APACHE_SCOREBOARD,
	LOAD_CGROUP,
	LOAD_SHARED_MEMORY,
	/* A load that the application keeps current in a map of its own (loadmap.h). */
	LOAD_SHARED_MAP,
};

/* The capacity of a load whose source has none. */
#define NO_CAPACITY 0xffffffff

/*
 * How a service accepts connections. The programs maintain the state of the dynamic policy.
 * User space writes that state only when it replaces the whole structure.
 */
struct acceptance {
	struct bpf_spin_lock lock;
	__u32 threshold; /* c: accepts while fewer workers than this are busy */
	__u32 attempts;	 /* in this window */
	__u32 accepted;
	__u32 window;	   /* the smallest number of attempts in a window */
	__u32 few;	   /* a window with fewer accepted raises the threshold */
	__u32 many;	   /* a window with more accepted lowers it */
	__u32 capacity;	   /* n of the configuration; NO_CAPACITY: that of the source */
	__u64 stale_after; /* ns; for loads that user space writes */
	__u64 window_time; /* ns: the shortest time of a window; 0: none, as in the paper */
	__u64 began;	   /* ns of the coarse clock: the start of this window */
	__u8 policy;	   /* enum accept_policy */
	__u8 source;	   /* enum load_source */
	__u8 reset;	   /* the stack resets connections that no server has */
	__u8 pad[1];
	__u32 initial; /* the first threshold; shows whether the policy was changed */
	__u32 number;  /* of the service: its place in `offers` */
	__u32 unused;
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

/*
 * The number of a service's open connections: those that its server has not closed. The program
 * counts those that it has seen begin. New ones are added to one of two halves. So the other half
 * can only shrink while user space compares it with the sockets (connections.h).
 */
struct connection_count {
	__s64 open[2];
	/* Open connections that the program has not seen begin, as user space last counted. */
	__s64 unseen;
	__u64 corrected; /* connections by which the number was wrong, and was corrected */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct connection_count);
} connections SEC(".maps");

/* The number of a service's open connections. The numbers are read one after another, so their sum
 * can be below 0 for a moment. It then counts as 0. */
static __always_inline __u32 open_connections(const struct connection_count *count)
{
	const volatile struct connection_count *now = count;
	__s64 sum = now->open[0] + now->open[1] + now->unseen;

	return sum > 0 ? sum : 0;
}

/* Whether open connections are counted on this host. */
volatile __u32 connections_counted;

/* The result of an offer: the `result` label of segue_agent_offers_total. */
enum offer {
	OFFER_ACCEPTED,
	OFFER_ACCEPTED_STALE, /* because no recent load is known */
	OFFER_REFUSED,
	OFFER_REFUSED_DOWN, /* no application listens */
	OFFER_FORCED,	    /* this server was the last candidate, or the only one */
	/* Of policy `least`, when no candidate has free capacity. */
	OFFER_ACCEPTED_LEAST, /* the last candidate, and no other has a lower load */
	OFFER_RETURNED,	      /* the last candidate, and an earlier one has a lower load */
	OFFER_TAKEN_BACK,     /* the last candidate has handed it back to this server */

	OFFER_COUNT,
};

struct offers {
	__u64 count[OFFER_COUNT];
};

/* The results of offers, by the number of the service. All cores count in one place: offers are
 * rare beside other packets, and copies for each core would take 4 MB each. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_MMAPABLE); /* aligns elements with cache lines */
	__type(key, __u32);
	__type(value, struct offers);
} offers SEC(".maps");

/* Returns how the service of a flow accepts connections, and sets `key` to the service's key. NULL:
 * the service has no accept policy. */
static __always_inline struct acceptance *find_acceptance(const struct flow_key *flow,
							  struct service_key *key)
{
	struct acceptance *acceptance;

	copy_address(&key->vip, &flow->destination);
	key->port = flow->destination_port;
	key->protocol = flow->protocol;
	acceptance = bpf_map_lookup_elem(&acceptances, key);
	if (acceptance)
		return acceptance;
	if (!to_first_key(key)) {
		key->port = 0;
		to_first_key(key);
	}
	return bpf_map_lookup_elem(&acceptances, key);
}

#endif
