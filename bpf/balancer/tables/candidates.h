/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Tables of candidates: which servers a flow's bucket names, now and in former generations.
 *
 * A table holds all generations of a service, so that one lookup reaches them and one store
 * replaces them. The row of a bucket lists its candidates of the present generation, then those of
 * the one before, and so on. A table follows from the configured servers alone, so balancers with
 * the same configuration have the same tables. Whether a server takes new flows at the moment is
 * known from its flags: servers that do not are skipped.
 */
#ifndef SEGUE_BALANCER_TABLES_CANDIDATES_H
#define SEGUE_BALANCER_TABLES_CANDIDATES_H

#include "net/crc.h"
#include "net/hash.h"
#include "balancer/tables/affinity.h"
#include "balancer/tables/maps.h"
#include "balancer/segments.h"
#include "balancer/tables/services.h"

static __always_inline __u32 candidates_of(const struct service *service)
{
	return service->rule.row & 0xf;
}

static __always_inline __u32 generations_of(const struct service *service)
{
	return service->rule.row >> 4 & 7;
}

static __always_inline enum bucket_hash bucket_hash_of(const struct service *service)
{
	return service->rule.row >> 7;
}

/* The hash of a flow. All balancers that share a seed compute the same. */
static __always_inline __u32 hash_of(const struct flow_key *flow)
{
	return mix(multilinear((const __u32 *)flow, TUPLE_WORDS, bucket_keys,
			       bucket_keys[TUPLE_WORDS]) >>
		   32);
}

/* Maps a hash onto 0..count-1 without a division (Lemire, "Fast random integer generation in an
 * interval", 2019, section 2). */
static __always_inline __u32 share_of(__u32 hash, __u32 count)
{
	return (__u64)hash * count >> 32;
}

/* The bucket of a flow. A service that uses the CRC has a power of two of buckets, so the highest
 * bits of the CRC are the bucket: switches need no product. It has no affinity. */
static __always_inline __u32 bucket_of(const struct flow_key *flow, const struct service *service)
{
	if (affinity_of(service))
		return share_of(affine_hash(flow, affinity_of(service)), buckets_of(service));
	if (has_features(FEATURE_BIT(FEATURE_CRC)) && bucket_hash_of(service) == BUCKET_HASH_CRC32)
		return share_of(crc_of(flow), buckets_of(service));
	return share_of(hash_of(flow), buckets_of(service));
}

/* The number of a service's candidate table in force, and of its column table. */
static __always_inline __u32 table_number(const struct service *service)
{
	return 2 * service->id + (service->rule.flags & RULE_TABLE);
}

/* The number of candidate 0 of the bucket's present generation. The candidates of all generations
 * follow one another. */
static __always_inline __u32 row_start(const struct service *service, __u32 bucket)
{
	return bucket * (candidates_of(service) * generations_of(service));
}

/* Reads candidates of a table. A lookup in an inner table is a call, and takes most of the time. So
 * the reader keeps the word of the last candidate, because the next one is often in it. */
struct candidate_reader {
	void *table;
	const struct candidates *word;
	__u32 number; /* of the word; none at first */
};

/* The server of a candidate; NO_SERVER where a row is shorter, or the table does not have it. */
static __always_inline __u32 read_candidate(struct candidate_reader *from, __u32 number)
{
	__u32 word = number / CANDIDATES_PER_WORD;

	if (word != from->number) {
		from->word = bpf_map_lookup_elem(from->table, &word);
		from->number = word;
	}
	return from->word ? from->word->server[number % CANDIDATES_PER_WORD] : NO_SERVER;
}

/* Reads a single candidate. */
static __always_inline __u32 candidate_at(void *table, __u32 number)
{
	struct candidate_reader from = { .table = table, .number = ~0 };

	return read_candidate(&from, number);
}

/* A candidate of a bucket's present generation. */
static __always_inline __u32 candidate_of(const struct service *service, __u32 bucket, __u32 place)
{
	__u32 key = table_number(service);
	void *table = bpf_map_lookup_elem(&tables, &key);

	return table ? candidate_at(table, row_start(service, bucket) + place) : NO_SERVER;
}

/* Whether a slot has a server of the service that takes new flows. */
static __always_inline bool is_taking(const struct service *service, __u32 number)
{
	return takes_flows_of(server_at(number), service);
}

/* Which servers of a row to list. */
enum listed {
	LIST_FIT,	/* servers whose next hop answers, and that do not fail */
	LIST_REACHABLE, /* servers whose next hop answers */
	LIST_ANY,
};

/* Whether a slot has a server of the service that is to be listed. */
static __always_inline bool is_wanted(const struct service *service, __u32 number,
				      enum listed wanted)
{
	const struct server *server = server_at(number);

	if (!serves(server, service))
		return false;
	switch (wanted) {
	case LIST_FIT:
		return is_reachable(server) && !(server->flags & SERVER_FAILING);
	case LIST_REACHABLE:
		return is_reachable(server);
	default:
		return true;
	}
}

/* Whether a list has a server. */
static __always_inline bool is_listed(const struct segments *segments, __u32 number)
{
	for (__u32 i = 0; i < MAX_SEGMENTS; i++) {
		__u32 count = segments->count;

		/* Otherwise the compiler compares `i` only with the lower of both bounds. The
		 * verifier of Linux 6.1 then does not see that the loop ends. */
		barrier_var(count);
		if (i >= count)
			break;
		if (segments->server[i] == number)
			return true;
	}
	return false;
}

/* Appends a server to a list, up to a maximum. False when the list has the server already, or no
 * room. */
static __always_inline bool append_server(struct segments *segments, __u32 number, __u32 most)
{
	__u32 count = segments->count;

	if (count >= most || is_listed(segments, number))
		return false;
	segments->server[count] = number;
	segments->count = count + 1;
	return true;
}

/* Appends a server, with its bits of `columns`. Only offers need these bits, and they have at most
 * MAX_CANDIDATES servers. False: as append_server. */
static __always_inline bool append_candidate(struct segments *segments, __u32 number, __u32 column)
{
	__u32 count = segments->count;

	if (!append_server(segments, number, MAX_SEGMENTS))
		return false;
	segments->columns |= (__u64)column << count * COLUMN_BITS;
	return true;
}

/* Appends the wanted servers of the newest `generations` of a row to the list, without duplicates.
 * Returns whether the row also has servers of the service that are not wanted. Not inlined: see
 * handle_in_full. */
__noinline int list_row(const struct service *service, __u32 generations, __u32 bucket,
			__u32 wanted, struct segments *segments)
{
	struct candidate_reader from = { .number = ~0 };
	__u32 first, length, table_key;
	bool has_others = false;

	if (!service || !segments || !buckets_of(service))
		return false;
	table_key = table_number(service);
	from.table = bpf_map_lookup_elem(&tables, &table_key);
	if (!from.table)
		return false;
	first = row_start(service, bucket);
	length = generations * candidates_of(service);
	for (__u32 i = 0; i < MAX_GENERATIONS * MAX_CANDIDATES && i < length; i++) {
		__u32 number = read_candidate(&from, first + i);

		if (is_wanted(service, number, wanted))
			append_server(segments, number, MAX_SEGMENTS);
		else if (is_wanted(service, number, LIST_ANY))
			has_others = true;
	}
	return has_others;
}

/* Appends the servers of a row with their columns: those that take new flows, or else
 * (`takes_flows` is false) those that can be reached. Not inlined: see handle_in_full. */
__noinline int list_own(const struct service *service, __u32 bucket, bool takes_flows,
			struct segments *segments)
{
	__u32 key, first;
	void *table;

	if (!service || !segments)
		return 0;
	key = table_number(service);
	table = bpf_map_lookup_elem(&tables, &key);
	if (!table)
		return 0;
	first = row_start(service, bucket);
	for (__u32 i = 0; i < MAX_CANDIDATES && i < candidates_of(service); i++) {
		__u32 number = candidate_at(table, first + i);

		if (takes_flows ? is_taking(service, number)
				: is_wanted(service, number, LIST_REACHABLE))
			append_candidate(segments, number, COLUMN(i));
	}
	return 0;
}

/* Appends the servers of a row that take new flows, with their columns. If only servers of other
 * rows take new flows, it lists the row's servers that can be reached: later packets could not find
 * a server outside the row. */
static __always_inline void list_own_row(const struct service *service, __u32 bucket,
					 struct segments *segments)
{
	__u32 before = segments->count;

	list_own(service, bucket, true, segments);
	if (segments->count == before && service->rule.flags & RULE_TAKES_FLOWS)
		list_own(service, bucket, false, segments);
}

/* How many rows are searched for one server that takes new flows. The servers of this many rows
 * nearly always include one, even if only one server in a thousand takes new flows. */
#define ROWS_FOR_ONE 4096
/* How many rows are searched for as many servers as a row has. */
#define ROWS_FOR_MORE 9

/* A search for servers that take new flows, row by row. */
struct search {
	__u32 bucket; /* the row that is searched */
	__u32 row;    /* how many rows were searched before it */
	__u32 place;  /* of the next candidate in the row */
	__u32 wanted; /* how many servers to find */
	__u32 found;
	__u32 server; /* found last */
	__u32 first;  /* the first server of the list before the search, until it is counted */
};

struct search_context {
	const struct service *service;
	struct search *search;
	struct segments *segments; /* NULL: the servers are not listed */
};

/* Lists and counts a server that the search has found. A server that the list has already counts in
 * the first row, because append_row() listed it without counting. In later rows it does not count,
 * with one exception: the first server of the list, if it was not counted yet. It may be the flow's
 * holder, which need not be in the first row, and may be the only server that takes new flows. */
static __always_inline void add_found(const struct search_context *in, __u32 number)
{
	struct search *search = in->search;
	__u32 column = search->row ? NO_COLUMN : COLUMN(search->place);
	bool is_new = !in->segments || append_candidate(in->segments, number, column);

	if (!is_new && search->row && number != search->first)
		return;
	if (number == search->first)
		search->first = NO_SERVER;
	search->server = number;
	search->found++;
}

/* Goes on with the next candidate of the row, or with the next row. */
static __always_inline void move_on(const struct service *service, struct search *search)
{
	if (++search->place < candidates_of(service))
		return;
	search->place = 0;
	search->row++;
	if (++search->bucket >= buckets_of(service))
		search->bucket = 0;
}

/* Takes the first server of the row that was reached, after a search without success. */
static __always_inline void find_any(const struct search_context *in)
{
	__u32 number = candidate_of(in->service, in->search->bucket, 0);

	if (is_wanted(in->service, number, LIST_ANY))
		add_found(in, number);
}

/* Looks at the next candidate. Returns 1 to end the search. */
static long search_candidate(__u32 turn, const struct search_context *in)
{
	struct search *search = in->search;
	__u32 number = candidate_of(in->service, search->bucket, search->place);

	if (is_taking(in->service, number))
		add_found(in, number);
	else if (number == NO_SERVER && search->wanted > search->place)
		search->wanted = search->place; /* the service has fewer servers than wanted */
	if (search->found >= search->wanted)
		return 1;
	move_on(in->service, search);
	return search->row >= (search->found ? ROWS_FOR_MORE : ROWS_FOR_ONE);
}

/* Runs a search. Not inlined, so that the verifier does not follow the content of `search`: it
 * would follow each number of found servers. */
__noinline int continue_search(const struct service *service, struct search *search,
			       struct segments *segments)
{
	struct search_context in = {
		.service = service,
		.search = search,
		.segments = segments,
	};

	if (!service || !search || !(service->rule.flags & RULE_TAKES_FLOWS))
		return 0;
	bpf_loop(ROWS_FOR_ONE * MAX_CANDIDATES, search_candidate, &in, 0);
	if (!search->found)
		find_any(&in);
	return 0;
}

/*
 * Fills an empty list with the servers of a row, if the row has no gap and all of its servers take
 * new flows, as in most rows. Otherwise the list stays empty. A row must fill whole words. Not
 * inlined: see handle_in_full.
 */
__noinline int list_whole_row(const struct service *service, __u32 bucket,
			      struct segments *segments)
{
	__u32 count, key, number;
	void *table;

	if (!service || !segments)
		return 0;
	key = table_number(service);
	table = bpf_map_lookup_elem(&tables, &key);
	if (!table)
		return 0;
	number = row_start(service, bucket) / CANDIDATES_PER_WORD;
	for (count = 0; count < MAX_CANDIDATES && count < candidates_of(service);
	     count += CANDIDATES_PER_WORD, number++) {
		const struct candidates *word = bpf_map_lookup_elem(table, &number);

		if (!word)
			return 0;
#pragma clang loop unroll(full)
		for (__u32 i = 0; i < CANDIDATES_PER_WORD; i++) {
			if (!is_taking(service, word->server[i]))
				return 0;
			segments->server[count + i] = word->server[i];
		}
	}
	segments->columns = ROW_COLUMNS & ((1ULL << count * COLUMN_BITS) - 1);
	segments->count = count;
	return 0;
}

/* Appends the servers of a row up to the first one that takes no new flows. False: the row has such
 * a server, or no server at all. Not inlined: see handle_in_full. */
__noinline int append_row(const struct service *service, __u32 bucket, struct segments *segments)
{
	struct candidate_reader from = { .number = ~0 };
	__u32 key, first;

	if (!service || !segments)
		return true;
	key = table_number(service);
	from.table = bpf_map_lookup_elem(&tables, &key);
	if (!from.table)
		return true;
	first = row_start(service, bucket);
	for (__u32 i = 0; i < MAX_CANDIDATES && i < candidates_of(service); i++) {
		__u32 number = read_candidate(&from, first + i);

		if (number == NO_SERVER && i)
			return true; /* the row is shorter than others */
		if (!is_taking(service, number))
			return false;
		append_candidate(segments, number, COLUMN(i));
	}
	return true;
}

/* Appends servers that take new flows until the list has as many as a row has candidates. Not
 * inlined: see handle_in_full. */
__noinline int append_substitutes(const struct service *service, __u32 bucket,
				  struct segments *segments)
{
	struct search search = { .bucket = bucket };

	if (!service || !segments)
		return 0;
	search.wanted = candidates_of(service);
	search.first = segments->count ? segments->server[0] : NO_SERVER;
	continue_search(service, &search, segments);
	return 0;
}

/*
 * Appends as many servers that take new flows as a row has candidates: those of the bucket's row,
 * and those of the next rows in place of the row's servers that take none. All balancers search the
 * same rows. It lists fewer servers if it finds no more, and any server if it finds none. Mostly,
 * all servers of the row take new flows, and there is nothing to search for.
 */
static __always_inline void list_taking(const struct service *service, __u32 bucket,
					struct segments *segments)
{
	if (!segments->count && candidates_of(service) % CANDIDATES_PER_WORD == 0) {
		list_whole_row(service, bucket, segments);
		if (segments->count)
			return;
	}
	if (!append_row(service, bucket, segments))
		append_substitutes(service, bucket, segments);
}

/* Returns the first server that takes new flows, in the bucket's row or the next ones; negative:
 * there is none. */
static __always_inline int search_first(const struct service *service, __u32 bucket)
{
	struct search search = { .bucket = bucket, .wanted = 1 };

	continue_search(service, &search, NULL);
	return search.found ? (int)search.server : -1;
}

/* Returns the first server that list_taking would list for an empty list; negative: there is none.
 * Not inlined: see handle_in_full. */
__noinline int first_taking(const struct service *service, __u32 bucket)
{
	return service ? search_first(service, bucket) : -1;
}

/*
 * Appends the servers that may have a flow of the bucket: its candidates, the servers that take new
 * flows in their place, and the candidates of former generations, which may have an older flow. A
 * server that fails may be down, and then cannot pass the packet on. So such servers come behind
 * the others, and servers that cannot be reached come last. They are not left out: otherwise the
 * server before them would be the last, and would reset a connection that it does not have. With
 * RULE_IN_ROW, flows are only on servers of their own row, so no other servers are listed.
 */
static __always_inline void list_possible(const struct service *service, __u32 bucket,
					  struct segments *segments)
{
	if (!stays_in_row(service))
		list_taking(service, bucket, segments);
	segments->columns = 0;
	if (!list_row(service, generations_of(service), bucket, LIST_FIT, segments))
		return; /* as in most rows, all of its servers are listed */
	list_row(service, generations_of(service), bucket, LIST_REACHABLE, segments);
	list_row(service, 1, bucket, LIST_ANY, segments);
}

/* Says what is asked of each listed server, and of the last. False when the list is empty. */
static __always_inline bool ask_listed(struct segments *segments, enum sid_function each,
				       enum sid_function last)
{
	if (!segments->count)
		return false;
	segments->first_server = server_at(segments->server[0]);
	ask(segments, each, last);
	return true;
}

/* Tells the listed servers how many bits the flow's cookie has. */
static __always_inline void ask_for_cookie(__u32 width, struct segments *segments)
{
	__u32 bits = bpf_cpu_to_be64((__u64)width << LOAD_COOKIE_SHIFT);

	segments->first_sid |= bits;
	segments->sid |= bits;
	segments->last_sid |= bits;
}

/* Sends a packet of an unknown flow through the servers that may have the flow. Each is asked for
 * `function`. False: there is none. */
static __always_inline bool visit(const struct flow_key *flow, const struct service *service,
				  enum sid_function function, struct segments *segments)
{
	segments->count = 0;
	list_possible(service, bucket_of(flow, service), segments);
	return ask_listed(segments, function, function);
}

#endif
