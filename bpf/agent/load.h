/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The present load of a service: what its source shows, and the connections that the source does
 * not show yet.
 */
#ifndef SEGUE_AGENT_LOAD_H
#define SEGUE_AGENT_LOAD_H

#include "loadmap.h"
#include "local.h"
#include "net/load.h"
#include "net/verifier.h"
#include "service.h"

/* Up to this number, half-open connections always count as load. */
#define FEW_HALF_OPEN 16

/* Reads the load source of a service. False when the load is unknown or stale. */
static __always_inline bool read_load(const struct acceptance *acceptance,
				      const struct service_key *key, const struct backlog *backlog,
				      struct load *load)
{
	const struct load *reported;
	const struct connection_count *count;

	load->capacity = NO_CAPACITY;
	switch (acceptance->source) {
	case LOAD_CONNECTIONS:
		count = bpf_map_lookup_elem(&connections, key);
		load->busy = count ? open_connections(count) : 0;
		return connections_counted;
	case LOAD_ACCEPT_QUEUE:
		load->busy = backlog->waiting;
		return true;
	case LOAD_SHARED_MAP:
		return read_load_map(key, load);
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

/*
 * The number of half-open connections that count as load. They have been accepted, and most of them
 * will be in the accept queue soon. But those of a flood will not. So they count up to the capacity
 * or, without a capacity, up to load->busy. FEW_HALF_OPEN of them may count in any case.
 */
static __always_inline __u32 half_open(const struct load *load, const struct backlog *backlog)
{
	__u32 most = load->capacity == NO_CAPACITY ? load->busy : load->capacity;

	if (most < FEW_HALF_OPEN)
		most = FEW_HALF_OPEN;
	return backlog->young < most ? backlog->young : most;
}

/* The number of connections that this server has accepted and that the source does not show yet. */
static __always_inline __u64 not_shown(enum load_source source, const struct load *load,
				       const struct backlog *backlog)
{
	switch (source) {
	case LOAD_CGROUP: /* connections are no CPU time */
		return 0;
	case LOAD_CONNECTIONS: /* both include the accept queue */
	case LOAD_ACCEPT_QUEUE:
		return half_open(load, backlog);
	default:
		return (__u64)half_open(load, backlog) + backlog->waiting;
	}
}

/* Whether the source still shows a connection that is ending now. The count of open connections
 * does not, nor does the map of an application. The accept queue and the CPU time never contain
 * it. */
static __always_inline bool shows_ending(enum load_source source)
{
	return source == LOAD_APACHE_SCOREBOARD || source == LOAD_SHARED_MEMORY;
}

/* Sets `load` to the present load of a service with a listening socket. False when the load is
 * unknown or stale. */
static __always_inline bool load_now(const struct acceptance *acceptance,
				     const struct service_key *key, const struct backlog *backlog,
				     struct load *load)
{
	__u64 busy;

	if (!read_load(acceptance, key, backlog, load))
		return false;
	if (acceptance->capacity != NO_CAPACITY)
		load->capacity = acceptance->capacity;
	busy = load->busy + not_shown(acceptance->source, load, backlog);
	load->busy = busy < 0xffffffff ? busy : 0xffffffff;
	return true;
}

/* A known_load in one word: `next` in the upper half. */
static __always_inline __u64 load_word(__u64 next, __u32 capacity)
{
	return (next < MAX_LOAD ? next : MAX_LOAD) << 32 | capacity;
}

/*
 * Makes a large load fit the argument of a SID. Load and capacity lose low bits. The highest load
 * that can be told is MAX_LOAD per unit of capacity. Not inlined: the verifier walks the loop once.
 */
__noinline __u64 scale_load(__u64 next, __u32 capacity)
{
	for (int i = 0; i <= 32 - LOAD_BITS; i++) {
		if ((next <= MAX_LOAD && capacity <= MAX_LOAD) || capacity <= 1)
			break;
		next = (next + 1) / 2;
		capacity /= 2;
	}
	return load_word(next, capacity);
}

/* The load as packets tell it: with one connection more (`next`), and with a capacity of 0 if the
 * source has none. Loads and capacities up to MAX_LOAD are exact. */
static __always_inline struct known_load told_load(const struct load *load)
{
	__u32 capacity = load->capacity == NO_CAPACITY ? 0 : load->capacity;
	__u64 next = (__u64)load->busy + 1, word;

	word = next <= MAX_LOAD && capacity <= MAX_LOAD ? load_word(next, capacity)
							: scale_load(next, capacity);
	word = forget(word); /* else the verifier walks what follows twice */
	return (struct known_load){ .next = word >> 32, .capacity = word };
}

#endif
