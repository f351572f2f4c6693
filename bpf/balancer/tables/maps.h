/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Tables that only user space writes. Sizes marked "set at load" are placeholders.
 */
#ifndef SEGUE_BALANCER_TABLES_MAPS_H
#define SEGUE_BALANCER_TABLES_MAPS_H

#include "balancer/tables/directory.h"
#include "balancer/tables/flowtable.h"
#include "balancer/tables/services.h"

/* Candidate tables, two for each service (candidates.h). User space builds a new one beside the one
 * in force. Then one update of the service's rule swaps them. The old one stays for packets under
 * way. The last element belongs to no service: user space replaces it to make the kernel wait until
 * no packet is under way. */
struct candidate_table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_INNER_MAP);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct candidates));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2 * MAX_SERVICES + 1);
	__type(key, __u32);
	__array(values, struct candidate_table);
} tables SEC(".maps");

/* State that user space reads after a restart; no program reads it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct identity);
} identity SEC(".maps");

/* Names of server and service, by the server's slot. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct server_label);
} server_labels SEC(".maps");

/* Names and generations of services, by their id. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct service_label);
} service_labels SEC(".maps");

/* What user space has inferred about a server, by the server's slot. Only servers of services
 * with a ranking have an element. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct estimate);
} estimates SEC(".maps");

/* How many entries a server had in the flow tables at the last sweep, by state. The numbers for
 * FLOW_FREE mean nothing. */
struct flow_count {
	__u64 time; /* of the sweep, in nanoseconds of CLOCK_BOOTTIME. 0: none has counted yet */
	__u32 flows[COUNTED_FLOW_STATES];
	__u32 half_open[COUNTED_FLOW_STATES];
};

/* The flows that the last sweep has counted, by the server's slot. User space copies them from the
 * sweep (sweep.bpf.c). So readers need not read the flow tables. The last element belongs to no
 * slot: user space writes its time last, when all counts of a sweep are stored. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct flow_count);
} flow_counts SEC(".maps");

#endif
