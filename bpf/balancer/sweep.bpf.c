/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The sweep frees the entries of flows whose timeout has passed, and of flows whose server was
 * removed. It counts all other entries by server and state. User space runs it. It is a program, so
 * that the rule is written once, and so that a kill of the process cannot fall between the change
 * of an entry and the count of that change.
 *
 * The program shares the flow tables with the programs of balancer.bpf.c. It is not in that file,
 * because the compiler would then use more stack and instructions for those programs.
 */
#include "balancer/tables/flowtable.h"
#include "balancer/tables/halfopen.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* All values of enum flow_state, which has three bits. */
#define SWEPT_STATES 8

/* How long the sweep keeps a server's entries, and how many it has kept, by state. */
struct swept_server {
	/* The age at which the sweep changes an entry, in ticks. 0: it changes all entries; more
	 * than FLOW_TIME_MASK: none. User space writes this before a sweep. */
	__u16 due[SWEPT_STATES];
	/* The age at which an established or closing entry is freed, in ticks. Such an entry that
	 * is due, but is younger, becomes silent. */
	__u16 established;
	__u16 pad;
	/* How many entries the sweep has kept. User space clears them before a sweep. */
	__u32 flows[SWEPT_STATES];
	__u32 half_open[SWEPT_STATES];
};

/* The number of slots. There is one swept_server for each, and one more without a server, which
 * stands for all higher slots. */
const volatile __u32 swept_slots;

/* The first swept_server. User space makes the section large enough for all of them. */
struct swept_server swept_servers_start SEC(".data.swept_servers") __hidden;

enum swept_table {
	SWEPT_FLOWS,
	SWEPT_HALF_OPEN,
	SWEPT_OBSERVED, /* its entries are not counted: they are no flows that have to be found */
};

/* The buckets that a run sweeps. */
struct sweep_run {
	__u32 first;
	__u32 count;
	__u32 table; /* enum swept_table */
};

/* No map mentions these types. The pointer makes the compiler describe them to user space. */
const union {
	struct sweep_run run;
	enum swept_table table;
} *shared_types __attribute__((unused));

/* The limits and counts for the entries of a slot. */
static __always_inline struct swept_server *swept_server_at(__u32 slot)
{
	struct swept_server *servers = &swept_servers_start;
	/* 64 bits: the verifier of Linux 6.1 does not know that a copy of 32 bits is the same. */
	__u64 number = slot;

	/* Otherwise the compiler assumes that the first server is the only one. */
	barrier_var(servers);
	barrier_var(number);
	return &servers[number < swept_slots ? number : swept_slots];
}

/* The state of an entry, as entry_state() returns it, computed without a branch. The processor
 * could not predict a branch, because any entry may be free, and the sweep would take twice as
 * long. A used entry without state bits is silent. An entry with both state bits and FLOW_BY_CLIENT
 * is closing. */
static __always_inline enum flow_state state_of(__u64 value)
{
	__u64 bits = value >> FLOW_STATE_SHIFT & FLOW_STATE_MASK, sign = -value;
	__u64 is_used, has_bits = (bits | bits >> 1) & 1;
	__u64 is_closing = bits & bits >> 1 & value / FLOW_BY_CLIENT, state;

	/* Otherwise the compiler makes it a branch. */
	barrier_var(sign);
	is_used = (value | sign) >> 63; /* 0 only if the value is 0 */
	state = bits | ((is_used ^ has_bits) | is_closing) * FLOW_SILENT;
	/* The verifier of Linux 6.1 does not know the bounds of an OR of two variables. */
	barrier_var(state);
	return state & (SWEPT_STATES - 1);
}

/* Whether an entry that is due becomes silent, and is not freed. A closing entry becomes silent
 * too: its time has fewer bits, and would wrap around before the entry is freed. */
static __always_inline bool turns_silent(enum flow_state state, __u64 age,
					 const struct swept_server *server)
{
	return (state == FLOW_ESTABLISHED || state == FLOW_CLOSING) && age < server->established;
}

/* Changes an entry that is due: makes it silent (`is_kept`), or frees it. False: another core has
 * changed it meanwhile. */
static __always_inline bool sweep_due(__u64 *entry, __u64 value, enum flow_state state, __u64 now,
				      bool is_kept)
{
	__u64 seen = (now - entry_age(value, now)) & FLOW_TIME_MASK;
	__u64 new = is_kept ? (value & ~FLOW_SEEN_MASK) | seen_bits(FLOW_SILENT, seen) : 0;
	struct load *load = load_at(entry_server(value));

	if (!entry_swap(entry, value, new))
		return false;
	if (load)
		count_states(load, state, is_kept ? FLOW_SILENT : FLOW_FREE);
	return true;
}

/*
 * Sweeps an entry, and counts it if it stays. An entry that another core changes meanwhile stays,
 * and counts as it was before. A free entry reads as one of slot 0 in the state FLOW_FREE, which is
 * never due.
 */
static __always_inline void sweep_entry(__u64 *entry, __u64 now, enum swept_table table)
{
	__u64 value = *(volatile __u64 *)entry, age = entry_age(value, now);
	struct swept_server *server = swept_server_at(entry_server(value));
	enum flow_state state = state_of(value);

	if (age >= server->due[state]) {
		bool is_kept = turns_silent(state, age, server);

		if (sweep_due(entry, value, state, now, is_kept)) {
			if (!is_kept)
				return;
			state = FLOW_SILENT;
		}
	}
	if (table == SWEPT_HALF_OPEN)
		server->half_open[state]++;
	else if (table == SWEPT_FLOWS)
		server->flows[state]++;
}

/*
 * Sweeps a bucket. The result is always 0.
 *
 * The verifier checks a global function once, with arguments that it knows nothing about, and not
 * at each call. Inlined, this function would cost 24 times the work: half a second at each start.
 */
__noinline int sweep_bucket(struct flow_bucket *bucket, __u64 now, enum swept_table table)
{
	if (!bucket)
		return 0;
	for (int way = 0; way < FLOWS_PER_BUCKET; way++)
		sweep_entry(&bucket->entry[way], now, table);
	return 0;
}

/* How many buckets one call by bpf_loop() sweeps. With fewer, the calls take much of the time. */
#define SWEEP_BATCH 8

struct sweep_batches {
	__u64 now;
	__u32 first; /* number of a bucket */
};

/* Sweeps the i-th batch, and stops at the end of the table. */
static __always_inline long sweep_batch(void *buckets, enum swept_table table, __u32 i,
					const struct sweep_batches *batches)
{
	__u32 first = batches->first + i * SWEEP_BATCH;

	for (int j = 0; j < SWEEP_BATCH; j++) {
		__u32 number = first + j;
		struct flow_bucket *bucket = bpf_map_lookup_elem(buckets, &number);

		if (!bucket)
			return 1;
		sweep_bucket(bucket, batches->now, table);
	}
	return 0;
}

static long sweep_flows_batch(__u32 i, struct sweep_batches *batches)
{
	return sweep_batch(&flows, SWEPT_FLOWS, i, batches);
}

static long sweep_half_open_batch(__u32 i, struct sweep_batches *batches)
{
	return sweep_batch(&half_open, SWEPT_HALF_OPEN, i, batches);
}

static long sweep_observed_batch(__u32 i, struct sweep_batches *batches)
{
	return sweep_batch(&observed, SWEPT_OBSERVED, i, batches);
}

/* Sweeps part of a flow table. The number of buckets is rounded up to whole batches. The result is
 * the number of batches, or negative after an error. */
SEC("syscall")
int sweep_flows(const struct sweep_run *run)
{
	struct sweep_batches batches = { .now = flow_now(), .first = run->first };
	__u32 count = (run->count + SWEEP_BATCH - 1) / SWEEP_BATCH;

	/* A free entry reads as one of slot 0, and must never be due. */
	swept_server_at(0)->due[FLOW_FREE] = FLOW_TIME_MASK + 1;
	switch (run->table) {
	case SWEPT_FLOWS:
		return bpf_loop(count, sweep_flows_batch, &batches, 0);
	case SWEPT_HALF_OPEN:
		return bpf_loop(count, sweep_half_open_batch, &batches, 0);
	default:
		return bpf_loop(count, sweep_observed_batch, &batches, 0);
	}
}
