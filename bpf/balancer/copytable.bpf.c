/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Copies a candidate table to memory that user space maps, or from it. System calls that read or
 * write many elements of a map take ten times as long. `segue status` reads the tables of all
 * services, and a start of the balancer writes them.
 */
#include "balancer/tables/maps.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* How many words a run copies at most: a power of two. */
#define COPIED_WORDS (1 << 16)

/* The first copied word. User space makes the section large enough for all of them. */
struct candidates copied_words_start SEC(".data.copied_words") __hidden;

/* The words that a run copies. */
struct copy_run {
	__u32 table; /* number of the candidate table */
	__u32 first;
	__u32 count;
	__u32 writes; /* 1: to the table; 0: from the table */
};

/* No map mentions the type. The pointer makes the compiler describe it to user space. */
const struct copy_run *shared_types __attribute__((unused));

/* How many words one call by bpf_loop() copies. With fewer, the calls take much of the time. */
#define COPY_BATCH 32

struct copying {
	__u32 table, first;
	__u32 copied;
	bool writes;
};

/* Copies the i-th batch, and stops at the end of the table. */
static long copy_batch(__u32 i, struct copying *c)
{
	void *table = bpf_map_lookup_elem(&tables, &c->table);
	struct candidates *copied_words = &copied_words_start;

	/* Otherwise the compiler assumes that the first word is the only one. */
	barrier_var(copied_words);
	if (!table)
		return 1;
	for (int j = 0; j < COPY_BATCH; j++) {
		__u32 place = i * COPY_BATCH + j, number = c->first + place;
		struct candidates *word = bpf_map_lookup_elem(table, &number);

		if (!word)
			return 1;
		if (c->writes)
			*word = copied_words[place % COPIED_WORDS];
		else
			copied_words[place % COPIED_WORDS] = *word;
		c->copied = place + 1;
	}
	return 0;
}

/* Copies part of a table. User space lets it write only to a table that no packet reads. The number
 * of words is rounded up to whole batches. The result is the number of words that were copied. */
SEC("syscall")
int copy_table(const struct copy_run *run)
{
	struct copying c = { .table = run->table, .first = run->first, .writes = run->writes };

	bpf_loop((run->count + COPY_BATCH - 1) / COPY_BATCH, copy_batch, &c, 0);
	return c.copied;
}
