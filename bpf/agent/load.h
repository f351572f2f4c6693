/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The load of a service, from the source that its configuration names.
 */
#ifndef SEGUE_AGENT_LOAD_H
#define SEGUE_AGENT_LOAD_H

#include "local.h"
#include "service.h"

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

#endif
