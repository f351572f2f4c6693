/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The tables that only user space writes. Sizes marked "set at load" are
 * placeholders.
 */
#ifndef SEGUE_BALANCER_MAPS_H
#define SEGUE_BALANCER_MAPS_H

#include "directory.h"
#include "services.h"

/* Consistent-hash tables. A new one is built beside the old; the service then
 * names it in one update, and the old one stays for packets on their way. The last is no
 * service's: it is replaced where only the kernel's waiting for packets is wanted. */
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

/* What user space must find again after a restart; no program reads it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct identity);
} identity SEC(".maps");

/* Which server of which service a slot is. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct label);
} server_labels SEC(".maps");

/* The names of services, by their number. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct label);
} service_labels SEC(".maps");

#endif
