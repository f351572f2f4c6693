/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Accept policies: whether this server accepts an offered connection. The policies `static` and
 * `dynamic` are algorithms 1 and 2 of 6LB. (SRLB prints algorithm 2, too, with an error: there the
 * attempts never accumulate.)
 */
#ifndef SEGUE_AGENT_ACCEPT_H
#define SEGUE_AGENT_ACCEPT_H

#include "decision.h"
#include "load.h"
#include "local.h"
#include "service.h"

/* Counts the result of an offer. A dry run records it instead. */
static __always_inline void count_offer(const struct acceptance *acceptance, enum offer result)
{
	__u32 number = acceptance->number;
	struct offers *counters;
	__u64 index = result;

	if (dry_run) {
		record.is_offer = true;
		record.offer = result;
		return;
	}
	counters = bpf_map_lookup_elem(&offers, &number);
	barrier_var(index); /* Linux 6.1 bounds only the register that is compared */
	if (counters && index < OFFER_COUNT)
		__sync_fetch_and_add(&counters->count[index], 1);
}

/* Algorithm 1, SRc: accepts while the load is less than the threshold. */
static __always_inline bool accept_static(__u32 threshold, const struct load *load)
{
	return load->busy < threshold;
}

/* The fields of struct acceptance that algorithm 2 changes. */
struct dynamic_state {
	__u32 threshold;
	__u32 attempts;
	__u32 accepted;
	__u64 began;
};

/* Ends a window of algorithm 2: changes the threshold by at most 1, so that about half of all
 * offers are accepted. `few` and `many` bound the accepted offers of a window with the smallest
 * number of attempts. A window may have more attempts, so both sides are scaled. */
static __always_inline void adapt(struct dynamic_state *state, const struct acceptance *acceptance,
				  __u32 most, __u64 now)
{
	__u64 accepted = (__u64)state->accepted * acceptance->window;

	if (accepted < (__u64)acceptance->few * state->attempts) {
		if (state->threshold < most)
			state->threshold++;
	} else if (accepted > (__u64)acceptance->many * state->attempts && state->threshold > 0) {
		state->threshold--;
	}
	state->attempts = 0;
	state->accepted = 0;
	state->began = now;
}

/*
 * Algorithm 2, SRdyn, in the order of the paper: the new threshold decides the last attempt of a
 * window. If that attempt is accepted, it counts as accepted in the next window, but not as an
 * attempt.
 *
 * The paper counts SYNs. A flood of SYNs would fill windows while the load does not change. Then
 * the threshold would follow the load, and half of all offers would be accepted whatever the load
 * is. So a window also lasts a minimum time, in which the SYNs of a flood find the same loads as
 * others.
 *
 * `most` is the highest threshold.
 */
static __always_inline bool accept_dynamic(struct acceptance *acceptance, const struct load *load,
					   __u32 most)
{
	/* No helper may be called while the lock is held. */
	__u64 now = acceptance->window_time ? bpf_ktime_get_coarse_ns() : 0;
	struct dynamic_state state;
	bool accepted;

	bpf_spin_lock(&acceptance->lock);
	state.threshold = acceptance->threshold;
	state.attempts = acceptance->attempts + 1;
	state.accepted = acceptance->accepted;
	state.began = acceptance->began;
	/* Another core may have begun the window after `now`. */
	if (state.attempts >= acceptance->window &&
	    (__s64)(now - state.began) >= (__s64)acceptance->window_time)
		adapt(&state, acceptance, most, now);
	accepted = accept_static(state.threshold, load);
	if (!dry_run) {
		acceptance->threshold = state.threshold;
		acceptance->attempts = state.attempts;
		acceptance->accepted = state.accepted + accepted;
		acceptance->began = state.began;
	}
	bpf_spin_unlock(&acceptance->lock);
	return accepted;
}

/* The highest threshold of the dynamic policy: the capacity. A source without a capacity counts
 * connections. Then the limit of the accept queue, which the application has set, is used. */
static __always_inline __u32 highest_threshold(const struct load *load,
					       const struct backlog *backlog)
{
	return load->capacity == NO_CAPACITY ? backlog->most : load->capacity;
}

/* Records the load by which the policy decides, in a dry run. */
static __always_inline void record_load(bool known, const struct load *load)
{
	if (!dry_run)
		return;
	record.asked_load = true;
	record.load_known = known;
	record.busy = load->busy;
	record.capacity = load->capacity;
}

/* Applies the policy. If the policy asks for this server's load, and the load is known, sets `own`
 * to it. */
static __always_inline enum offer decide_offer(struct acceptance *acceptance,
					       const struct service_key *key,
					       const struct backlog *backlog,
					       struct known_load *own)
{
	struct load load = {};
	bool known, accepted;

	if (acceptance->policy == ACCEPT_ALWAYS)
		return OFFER_ACCEPTED;
	if (acceptance->policy == ACCEPT_NEVER)
		return OFFER_REFUSED;
	known = load_now(acceptance, key, backlog, &load);
	record_load(known, &load);
	if (!known)
		return OFFER_ACCEPTED_STALE;
	*own = told_load(&load);
	if (acceptance->policy == ACCEPT_STATIC)
		accepted = accept_static(acceptance->threshold, &load);
	else
		accepted = accept_dynamic(acceptance, &load, highest_threshold(&load, backlog));
	return accepted ? OFFER_ACCEPTED : OFFER_REFUSED;
}

#endif
