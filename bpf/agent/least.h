/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Policy `least`: the candidates of a list compare their loads (docs/understand/protocol.md,
 * "Servers that compare their loads").
 *
 * A candidate with free capacity accepts the connection. A busy one writes its load into its own
 * entry of the list, and passes the connection on. The last candidate compares its own load with
 * those in the list. If an earlier candidate has a lower one, the last candidate hands the
 * connection back: it overwrites its own entry with that candidate's SID and the function
 * connect-force. The list grows by no byte, and the segments left never increase, so no packet
 * loops. A candidate that passes a connection on keeps no state about it.
 */
#ifndef SEGUE_AGENT_LEAST_H
#define SEGUE_AGENT_LEAST_H

#include "accept.h"
#include "envelope.h"
#include "net/report.h"

/* How many entries of the list the last candidate reads. A balancer lists itself and at most seven
 * servers in front of the last candidate. The list is in reverse order: the entry of an earlier
 * candidate has a higher index. */
#define MAX_EARLIER 8

/* The candidate that gets a connection, and its load. */
struct candidate {
	struct in6_addr sid;
	struct known_load load;
};

/* Whether a segment offers the connection to another server. */
static __always_inline bool is_offer(const struct in6_addr *sid)
{
	return sid_function(sid) == SID_CONNECT_AVAIL && is_other_server(sid);
}

/* What a load report says about the first candidate, by the candidate's entry of the list. */
static __always_inline __u32 first_of(const struct in6_addr *entry)
{
	__u64 argument = bpf_be64_to_cpu(low_bits_of(entry));

	if (argument & LOAD_NO_COLUMN)
		return REPORT_NO_COLUMN;
	return (argument >> LOAD_COLUMN_SHIFT & 7) << REPORT_COLUMN_SHIFT |
	       load_code(load_of_sid(low_bits_of(entry)));
}

/* Whether this server is the first candidate of the list. It is, unless the entry in front of its
 * own offers the connection to another server. */
static __always_inline bool is_first_candidate(struct xdp_md *ctx, const struct envelope *envelope)
{
	__u32 in_front = envelope->segments_left + 1;
	struct in6_addr entry;

	return in_front > envelope->last_entry || !load_entry(ctx, envelope, in_front, &entry) ||
	       !is_offer(&entry);
}

/*
 * Finds the earlier candidate that has the lowest load, if that is lower than `best->load`. Of
 * several, it is the first one of the list. An unknown load in `best` is higher than any other.
 * False: there is no such candidate. Not inlined: the verifier walks it once.
 */
__noinline int find_least_busy(struct xdp_md *ctx, const struct envelope *envelope,
			       struct candidate *best)
{
	bool is_found = false;

	if (!envelope || !best)
		return false;
	for (__u32 i = 0; i < MAX_EARLIER; i++) {
		__u32 index = envelope->last_entry - i;
		struct known_load load;
		struct in6_addr entry;

		/* No earlier candidate has entry 0: it is the VIP's or the last candidate's. */
		if (i >= envelope->last_entry || index <= envelope->segments_left)
			break;
		if (!load_entry(ctx, envelope, index, &entry) || !is_offer(&entry))
			continue;
		load = load_of_sid(low_bits_of(&entry));
		if (!load.next || (best->load.next && !is_less_busy(load, best->load)))
			continue;
		best->sid = entry;
		best->load = load;
		is_found = true;
	}
	return is_found;
}

/*
 * What a load report says about the first candidate of the list, which the balancer believed to be
 * the least busy one: its column and its load, or that it is this server (REPORT_IS_FIRST). Not
 * inlined: the verifier walks it once.
 */
__noinline __u32 first_candidate(struct xdp_md *ctx, const struct envelope *envelope)
{
	if (!envelope)
		return REPORT_NO_COLUMN;
	for (__u32 i = 0; i < MAX_EARLIER; i++) {
		__u32 index = envelope->last_entry - i;
		struct in6_addr entry;

		if (i > envelope->last_entry || index <= envelope->segments_left)
			break;
		if (!load_entry(ctx, envelope, index, &entry) ||
		    sid_function(&entry) != SID_CONNECT_AVAIL)
			continue;
		return in_node_locator(&entry) ? REPORT_IS_FIRST : first_of(&entry);
	}
	return REPORT_IS_FIRST;
}

/* Overwrites this server's own entry of the list. False if the list does not contain it. A reduced
 * header omits the first server's entry. */
static __always_inline bool store_own_entry(struct xdp_md *ctx, const struct envelope *envelope,
					    const struct in6_addr *sid)
{
	struct in6_addr *entry = list_entry(ctx, envelope, envelope->segments_left);

	if (envelope->segments_left > envelope->last_entry || !entry ||
	    locator_of(entry) != node_locator || low_bits_of(entry) != envelope->sid_low)
		return false;
	copy_address(entry, sid);
	return true;
}

/* Tells the later candidates this server's load. If the list has no entry of this server, the
 * load stays unknown to them. */
static __always_inline void show_load(struct xdp_md *ctx, const struct envelope *envelope,
				      struct known_load load)
{
	struct in6_addr own;

	((__u64 *)&own)[0] = node_locator;
	((__u64 *)&own)[1] = sid_low_with_load(envelope->sid_low, load);
	store_own_entry(ctx, envelope, &own);
}

/* Hands the connection back to the least busy of the earlier candidates, if its load is lower than
 * this server's. False: there is no such candidate, the hop limit is used up, or the list does not
 * contain this server's entry. */
static __always_inline bool hand_back(struct xdp_md *ctx, const struct envelope *envelope,
				      struct known_load own)
{
	struct candidate least = { .load = own };
	__u64 *low = (__u64 *)&least.sid + 1;

	if (envelope->hop_limit <= 1 || !find_least_busy(ctx, envelope, &least))
		return false;
	*low = sid_low_with_function(*low, SID_CONNECT_FORCE);
	return store_own_entry(ctx, envelope, &least.sid);
}

/* Decides about an offer without regard to free capacity. The last server hands the connection
 * back, or else accepts it. Any other server refuses it, so that it goes on along the list. `own`
 * is unknown if the application does not listen, if its load is unknown, or if the service is
 * drained. */
static __always_inline enum offer compare_loads(struct xdp_md *ctx, const struct envelope *envelope,
						bool listens, bool drained, struct known_load own)
{
	if (is_last_server(envelope)) {
		if (hand_back(ctx, envelope, own))
			return OFFER_RETURNED;
		return own.next ? OFFER_ACCEPTED_LEAST : OFFER_FORCED;
	}
	if (!listens)
		return OFFER_REFUSED_DOWN;
	/* A server without a load gets the share of connections that hashing would give it. */
	if (!own.next && !drained && is_first_candidate(ctx, envelope))
		return OFFER_ACCEPTED_STALE;
	return OFFER_REFUSED;
}

/* Applies policy `least` to an offer, and sets `own` to this server's load if it is known. A
 * drained service is treated as if its load were unknown, except that it does not accept as the
 * first candidate. So it tells no load, and gets no connection back. */
static __always_inline enum offer decide_least(struct xdp_md *ctx, const struct envelope *envelope,
					       const struct acceptance *acceptance,
					       const struct service_key *key, bool listens,
					       const struct backlog *backlog,
					       struct known_load *own)
{
	bool drained = acceptance->policy == ACCEPT_DRAINED;
	struct load load = {};

	if (listens && !drained) {
		bool known = load_now(acceptance, key, backlog, &load);

		record_load(known, &load);
		if (known && load.capacity != NO_CAPACITY && load.busy < load.capacity)
			return OFFER_ACCEPTED;
		if (known)
			*own = told_load(&load);
	}
	return compare_loads(ctx, envelope, listens, drained, *own);
}

#endif
