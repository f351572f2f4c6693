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
#include "flowtable.h"
#include "halfopen.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* How long the sweep keeps a server's entries, and how many it has kept, by state. */
struct swept_server {
	/* The age at which an entry is freed, in ticks. 0: all entries are freed; more than
	 * FLOW_TIME_MASK: none. User space writes it before a sweep. */
	__u16 lifetime[FLOW_STATES];
	/* How many entries the sweep has kept. User space clears them before a sweep. */
	__u32 flows[FLOW_STATES];
	__u32 half_open[FLOW_STATES];
};

/* The number of slots. There is one swept_server for each, and one more without a server, which
 * stands for all higher slots. */
const volatile __u32 swept_slots;

/* The first swept_server. User space makes the section large enough for all of them. */
struct swept_server swept_servers_start SEC(".data.swept_servers") __hidden;

/* The buckets that a run sweeps. */
struct sweep_run {
	__u32 first;
	__u32 count;
	__u32 is_half_open; /* 0: buckets of flows; 1: of half_open */
};

/* Makes the compiler describe this type to user space, which no map mentions. */
const struct sweep_run *shared_type __attribute__((unused));

static __always_inline struct swept_server *swept_server_at(__u32 slot)
{
	struct swept_server *servers = &swept_servers_start;

	/* Otherwise the compiler assumes that the first server is the only one. */
	barrier_var(servers);
	return &servers[slot < swept_slots ? slot : swept_slots];
}

/*
 * Frees or counts an entry. An entry that another core changes meanwhile stays, and counts as it
 * was before. A free entry is 0, so it is one of slot 0 in the state FLOW_FREE. It needs no branch
 * of its own. The processor could not predict such a branch, because any entry may be free, and the
 * sweep would take twice as long.
 */
static __always_inline void sweep_entry(__u64 *entry, __u64 now, bool is_half_open)
{
	__u64 value = *(volatile __u64 *)entry;
	struct swept_server *server = swept_server_at(entry_server(value));
	enum flow_state state = entry_state(value);

	if (entry_age(value, now) >= server->lifetime[state] &&
	    entry_transition(entry, value, 0).is_done)
		return;
	if (is_half_open)
		server->half_open[state]++;
	else
		server->flows[state]++;
}

/* How many buckets one call by bpf_loop() sweeps. With fewer, the calls take much of the time.
 * With more, the verifier takes longer. */
#define SWEEP_BATCH 8

struct sweep_batches {
	__u64 now;
	__u32 first; /* number of a bucket */
};

/* Sweeps the i-th batch, and stops at the end of the table. */
static __always_inline long sweep_batch(void *table, bool is_half_open, __u32 i,
					const struct sweep_batches *batches)
{
	__u32 first = batches->first + i * SWEEP_BATCH;
	__u64 now = batches->now;

	for (int j = 0; j < SWEEP_BATCH; j++) {
		__u32 number = first + j;
		struct flow_bucket *bucket = bpf_map_lookup_elem(table, &number);

		if (!bucket)
			return 1;
		for (int way = 0; way < FLOWS_PER_BUCKET; way++)
			sweep_entry(&bucket->entry[way], now, is_half_open);
	}
	return 0;
}

static long sweep_flows_batch(__u32 i, struct sweep_batches *batches)
{
	return sweep_batch(&flows, false, i, batches);
}

static long sweep_half_open_batch(__u32 i, struct sweep_batches *batches)
{
	return sweep_batch(&half_open, true, i, batches);
}

/* Sweeps part of a flow table. The number of buckets is rounded up to whole batches. The result is
 * the number of batches, or negative after an error. */
SEC("syscall")
int sweep_flows(const struct sweep_run *run)
{
	struct sweep_batches batches = { .now = flow_now(), .first = run->first };
	__u32 count = (run->count + SWEEP_BATCH - 1) / SWEEP_BATCH;

	swept_server_at(0)->lifetime[FLOW_FREE] = FLOW_TIME_MASK + 1;
	if (run->is_half_open)
		return bpf_loop(count, sweep_half_open_batch, &batches, 0);
	return bpf_loop(count, sweep_flows_batch, &batches, 0);
}
