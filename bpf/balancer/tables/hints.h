/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The hint table: a hint tells in 16 bits which server probably has a flow. A set is two words with
 * four hints each, in one cache line. All cores share the table without locks. Readers load a word
 * once. Writers replace it by compare-and-swap; a writer that loses the race changes nothing.
 *
 *    15           8 7      5 4      2 1     0
 *   +--------------+--------+--------+-------+
 *   |     tag      | column |  mark  |  use  |
 *   +--------------+--------+--------+-------+
 *
 * The set, its word to look at first, and the tag come from a hash of the flow. Most hints are in
 * their first word. Most flows with the same set have different tags, but not all. So a hint can be
 * another flow's. A server that does not have the flow returns the packet, and the packet then
 * visits all servers that may have the flow (docs/operate/stateless.md, "Hints").
 *
 * The column is that of the flow's server in the row of the flow's bucket. The mark is a hash of
 * the server's number. It tells the servers apart that the column has had. It also refutes most
 * hints of other flows: in their buckets, the column has other servers.
 */
#ifndef SEGUE_BALANCER_TABLES_HINTS_H
#define SEGUE_BALANCER_TABLES_HINTS_H

#include "balancer/decision.h"
#include "balancer/tables/flowtable.h"

#define WORDS_PER_SET 2
#define HINTS_PER_WORD 4
#define HINT_BITS 16
#define HINT_MASK 0xffffU
#define HINT_TAG_BITS 8
#define HINT_TAG_MASK ((1 << HINT_TAG_BITS) - 1)
#define HINT_TAG_SHIFT 8
#define HINT_COLUMN_SHIFT 5
#define HINT_MARK_BITS 3
#define HINT_MARK_SHIFT 2
#define HINT_USE_MASK 3U

/* Each sweep makes recent hints idle, and frees idle and shared ones
 * (internal/balancer/dataplane/hints.go). */
enum hint_use {
	HINT_FREE,
	HINT_IDLE,   /* a new hint may replace it */
	HINT_RECENT, /* a packet has followed it since the last sweep */
	HINT_SHARED, /* several flows have this tag, so the rest says nothing */
};

struct hint_set {
	__u64 word[WORDS_PER_SET];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: a power of two */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct hint_set);
} hints SEC(".maps");

/* 64 less the bits of a set's number. */
const volatile __u32 hint_set_shift;

/* The hint of a flow, as a lookup found it. */
struct hint {
	struct hint_set *set; /* NULL: there is no hint table */
	__u64 read;	      /* the word that was read last */
	__u32 word;	      /* its number in the set */
	__u32 tag;	      /* at its position in a hint */
	__u32 value;	      /* the flow's hint; 0: there is none */
	__u32 place;	      /* the hint's first bit in the word */
};

static __always_inline bool has_hints(void)
{
	return has_features(FEATURE_BIT(FEATURE_HINTS));
}

/* The mark of a server, at its position in a hint. The highest bits of the product spread
 * consecutive numbers evenly. */
static __always_inline __u32 hint_mark(__u32 server)
{
	return server * (__u32)(GOLDEN_RATIO >> 32) >> (32 - HINT_MARK_BITS) << HINT_MARK_SHIFT;
}

static __always_inline __u32 hint_use(__u32 value)
{
	return value & HINT_USE_MASK;
}

static __always_inline __u32 hint_column(__u32 value)
{
	return value >> HINT_COLUMN_SHIFT & (MAX_CANDIDATES - 1);
}

/* Whether a hint has the mark of a server. */
static __always_inline bool hint_names(__u32 value, __u32 server)
{
	return (value & ((1 << HINT_MARK_BITS) - 1) << HINT_MARK_SHIFT) == hint_mark(server);
}

/* A word that has the number in the place of each hint. */
#define IN_EACH_HINT(number) ((number) * 0x0001000100010001ULL)

/*
 * Searches a word for the hint with a tag. Without branches, because the processor could not
 * predict which of the hints is the flow's. The difference from the tag is at most 0x7f80 after the
 * shift. So bit 15 of a hint remains if the tags are equal, and no hint borrows from the next one.
 * The last product turns the bit of the first such hint into the place 0, 16, 32 or 48, in its
 * highest bits.
 */
static __always_inline void hint_search(struct hint *hint)
{
	__u64 tags = IN_EACH_HINT((__u64)HINT_TAG_MASK << HINT_TAG_SHIFT);
	__u64 highest = IN_EACH_HINT(1ULL << (HINT_BITS - 1));
	__u64 differs = (hint->read ^ IN_EACH_HINT((__u64)hint->tag)) & tags;
	__u64 found = (highest - (differs >> 1)) & highest;
	__u64 first = (found & -found) >> (HINT_BITS - 1);

	if (!found)
		return;
	hint->place = first * (16ULL << 42 | 32ULL << 26 | 48ULL << 10) >> 58;
	hint->value = hint->read >> hint->place & HINT_MASK;
}

static __always_inline __u64 hint_word(const struct hint *hint, __u32 word)
{
	return *(const volatile __u64 *)&hint->set->word[word & (WORDS_PER_SET - 1)];
}

/* Reads a word of the set, and searches it for the flow's hint. */
static __always_inline void hint_read(struct hint *hint, __u32 word)
{
	hint->word = word;
	hint->read = hint_word(hint, word);
	hint_search(hint);
}

static struct hint_set hints_copy;

/* The set of a flow. A dry run changes a copy. */
static __always_inline struct hint_set *hint_set_of(__u64 hash)
{
	__u32 number = hash >> hint_set_shift;
	struct hint_set *set = bpf_map_lookup_elem(&hints, &number);

	if (!dry_run || !set)
		return set;
	hints_copy = *set;
	return &hints_copy;
}

/* The number of the set, one bit for the first word, and the tag follow one another in the hash. A
 * free hint is 0, so no flow has the tag 0. */
static __always_inline void hint_lookup(const struct flow_key *key, __u32 service,
					struct hint *hint)
{
	__u64 hash = flow_place(key, service);
	__u32 rest;

	*hint = (struct hint){};
	if (!has_hints())
		return;
	rest = hash >> (hint_set_shift - HINT_TAG_BITS - 1);
	hint->tag = (rest & HINT_TAG_MASK ?: 1) << HINT_TAG_SHIFT;
	hint->set = hint_set_of(hash);
	if (!hint->set)
		return;
	hint_read(hint, rest >> HINT_TAG_BITS & 1);
	if (!hint->value)
		hint_read(hint, hint->word ^ 1);
	note_hint(hint->value);
}

/* Whether the lookup found a hint that names a column. */
static __always_inline bool hint_known(const struct hint *hint)
{
	return hint->value && hint_use(hint->value) != HINT_SHARED;
}

/* Replaces the value at a place of the word, unless the word has changed since it was read. */
static __always_inline void hint_put(const struct hint *hint, __u32 place, __u32 value)
{
	__u64 put = (hint->read & ~((__u64)HINT_MASK << place)) | (__u64)value << place;

	if (hint->set)
		__sync_val_compare_and_swap(&hint->set->word[hint->word & (WORDS_PER_SET - 1)],
					    hint->read, put);
}

/* Notes that a packet has followed the hint. */
static __always_inline void hint_renew(const struct hint *hint)
{
	if (hint_use(hint->value) == HINT_IDLE)
		hint_put(hint, hint->place, (hint->value & ~HINT_USE_MASK) | HINT_RECENT);
}

/* The last place in a word whose hint has this use; negative: there is none. */
static __always_inline int place_with(__u64 word, enum hint_use use)
{
	int found = -1;

#pragma unroll
	for (int place = 0; place < HINTS_PER_WORD * HINT_BITS; place += HINT_BITS)
		if (hint_use(word >> place) == use)
			found = place;
	return found;
}

/*
 * Finds the place for a new hint: a free one, or else an idle one. It searches the flow's first
 * word first. Negative: there is no place, or a word that it has read has a hint with the tag.
 * Another core has then entered this hint since the lookup, and it must stay: the first server that
 * answers a SYN has to keep the flow. Two cores that enter hints at the same moment, one in each
 * word, do not see each other's.
 */
static __always_inline int hint_room(struct hint *hint)
{
	__u32 second = hint->word; /* the lookup has read this word last */

#pragma unroll
	for (enum hint_use use = HINT_FREE; use <= HINT_IDLE; use++) {
#pragma unroll
		for (__u32 i = 1; i <= WORDS_PER_SET; i++) {
			int place;

			hint_read(hint, (second + i) % WORDS_PER_SET);
			if (hint->value)
				return -1;
			place = place_with(hint->read, use);
			if (place >= 0)
				return place;
		}
	}
	return -1;
}

/*
 * The use of a hint after a server has told that it has the flow. `is_same`: the hint names that
 * server already. `is_proven`: the client has answered the server, so the packet is not of a flood.
 *
 *	before                  after, if proven    if not proven
 *	shared                  shared              shared
 *	recent, same server     recent              recent
 *	recent, other server    shared              recent
 *	free or idle            recent              idle
 *
 * A recent hint of another server is probably of another flow with the same tag. A hint of a
 * flood is idle, so that it is soon replaced.
 */
static __always_inline enum hint_use hint_next_use(enum hint_use before, bool is_same,
						   bool is_proven)
{
	if (before == HINT_SHARED || (before == HINT_RECENT && (is_same || !is_proven)))
		return before;
	if (before == HINT_RECENT)
		return HINT_SHARED;
	return is_proven ? HINT_RECENT : HINT_IDLE;
}

/*
 * Enters the server that has a flow. False if there is no room, or if the hint names another server
 * and the client has not answered yet: of two servers that accept a repeated SYN, the first one
 * keeps the hint.
 */
static __always_inline bool hint_enter(struct hint *hint, __u32 column, __u32 server,
				       bool is_proven)
{
	__u32 value = hint->tag | column << HINT_COLUMN_SHIFT | hint_mark(server);
	bool is_same = !((hint->value ^ value) & ~HINT_USE_MASK);
	int place;

	if (!hint->set || (hint->value && !is_same && !is_proven))
		return false;
	place = hint->value ? (int)hint->place : hint_room(hint);
	if (place < 0)
		return false;
	value |= hint_next_use(hint_use(hint->value), is_same, is_proven);
	if (value != hint->value)
		hint_put(hint, place & (HINTS_PER_WORD * HINT_BITS - 1), value);
	return true;
}

/* Removes the hint of a flow that has ended, if the hint names the server. */
static __always_inline void hint_remove(const struct hint *hint, __u32 server)
{
	if (hint_known(hint) && hint_names(hint->value, server))
		hint_put(hint, hint->place, 0);
}

#endif
