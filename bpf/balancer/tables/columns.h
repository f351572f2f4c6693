/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Column tables: for each bucket and column, the server of the present generation, or NO_SERVER if
 * the column has had other servers, too. A service without a flow table reads its column table for
 * each packet. So the table is small, and stays in the cache: 256 KB for 65,536 buckets of two
 * candidates. Only packets of changed columns read the candidate table, which has the column's
 * history.
 */
#ifndef SEGUE_BALANCER_TABLES_COLUMNS_H
#define SEGUE_BALANCER_TABLES_COLUMNS_H

#include "balancer/tables/candidates.h"
#include "balancer/tables/hints.h"

/* The most buckets times candidates of a service. */
#define COLUMN_TABLE_SIZE (1 << 19)

/* All tables have the same size, so that the verifier replaces each lookup by a few instructions.
 * The call would take as long as all of these. */
struct column_table {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COLUMN_TABLE_SIZE / CANDIDATES_PER_WORD);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct candidates));
};

/* Two column tables for each service. The one in force changes with the candidate table. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 2 * MAX_SERVICES);
	__type(key, __u32);
	__array(values, struct column_table);
} columns SEC(".maps");

/* The server of a bucket's column, if the column never had another one; else NO_SERVER. */
static __always_inline __u32 only_server_of(const struct service *service, __u32 bucket,
					    __u32 column)
{
	__u32 number = bucket * candidates_of(service) + column;
	__u32 key = table_number(service), word = number / CANDIDATES_PER_WORD;
	void *table = bpf_map_lookup_elem(&columns, &key);
	const struct candidates *servers;

	if (!table)
		return NO_SERVER;
	servers = bpf_map_lookup_elem(table, &word);
	return servers ? servers->server[number % CANDIDATES_PER_WORD] : NO_SERVER;
}

/*
 * Appends those wanted servers that a bucket's column has or had, the newest first, without
 * duplicates. Not inlined: see handle_in_full.
 *
 * The loops over generations are unrolled: Linux 6.1 refuses a loop whose last instruction is not a
 * jump, and clang 14 makes such loops here.
 */
__noinline int list_column(const struct service *service, __u32 bucket, __u32 column, __u32 wanted,
			   struct segments *segments)
{
	__u32 first, length, table_key;
	void *table;

	if (!service || !segments || !buckets_of(service))
		return 0;
	table_key = table_number(service);
	table = bpf_map_lookup_elem(&tables, &table_key);
	if (!table)
		return 0;
	first = row_start(service, bucket) + column;
	length = generations_of(service);
#pragma unroll
	for (__u32 i = 0; i < MAX_GENERATIONS; i++) {
		__u32 number;

		barrier_var(length); /* the compiler would compare `i` with the lower bound only */
		if (i >= length)
			break;
		number = candidate_at(table, first + i * candidates_of(service));
		if (is_wanted(service, number, wanted))
			append_server(segments, number, MAX_SEGMENTS);
	}
	return 0;
}

/* The server of a bucket's column, now or formerly, whose mark is that of the hint. Negative: there
 * is none, or several servers have the mark. Not inlined: see handle_in_full. */
__noinline int server_with_mark(const struct service *service, __u32 bucket, __u32 hint)
{
	__u32 first, length, table_key;
	int found = -1;
	void *table;

	if (!service || !buckets_of(service))
		return -1;
	table_key = table_number(service);
	table = bpf_map_lookup_elem(&tables, &table_key);
	if (!table)
		return -1;
	first = row_start(service, bucket) + hint_column(hint);
	length = generations_of(service);
#pragma unroll
	for (__u32 i = 0; i < MAX_GENERATIONS; i++) {
		__u32 number;

		barrier_var(length); /* the compiler would compare `i` with the lower bound only */
		if (i >= length)
			break;
		number = candidate_at(table, first + i * candidates_of(service));
		if (!hint_names(hint, number) || !is_wanted(service, number, LIST_ANY))
			continue;
		if (found >= 0 && found != (int)number)
			return -1;
		found = number;
	}
	return found;
}

/* The column of a bucket's row that has the server, or else one that had it; negative: there is
 * none. Not inlined: see handle_in_full. */
__noinline int column_with(const struct service *service, __u32 bucket, __u32 server)
{
	__u32 first, column = 0, table_key;
	void *table;

	if (!service || !buckets_of(service))
		return -1;
	table_key = table_number(service);
	table = bpf_map_lookup_elem(&tables, &table_key);
	if (!table)
		return -1;
	first = row_start(service, bucket);
	for (__u32 i = 0; i < MAX_GENERATIONS * MAX_CANDIDATES; i++) {
		if (i >= generations_of(service) * candidates_of(service))
			break;
		if (candidate_at(table, first + i) == server)
			return column;
		if (++column >= candidates_of(service))
			column = 0;
	}
	return -1;
}

#endif
