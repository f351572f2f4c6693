/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A token bucket that limits the work that strangers can cause on a core. The program defines
 * `dry_run` before.
 */
#ifndef SEGUE_NET_TOKEN_H
#define SEGUE_NET_TOKEN_H

#include "types.h"

/*
 * The rate of each core, and the burst. Clients have no reason to ask for more, and at a few
 * microseconds each it takes less than a hundredth of a core. Linux sends as many ICMP errors
 * (net.ipv4.icmp_msgs_per_sec), though for a whole host.
 */
#define TOKENS_PER_SECOND 1000
#define TOKENS_IN_A_ROW 100
#define TOKEN_INTERVAL (1000000000ULL / TOKENS_PER_SECOND) /* ns */

/* Takes a token. A new token comes after each interval in ns, and at most `in_a_row` tokens wait.
 * False when no token waits. `used` is the time up to which the tokens are used, in ns of the
 * coarse monotonic clock; NULL: there are none. A dry run takes no token, and tells whether there is
 * one. */
static __always_inline bool take_token_of(__u64 *used, __u64 interval, __u64 in_a_row)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u64 full = now - in_a_row * interval, copy;

	if (!used)
		return false;
	copy = *used;
	if (dry_run)
		used = &copy;
	if (*used < full)
		*used = full;
	if (*used + interval > now)
		return false;
	*used += interval;
	return true;
}

static __always_inline bool take_token(__u64 *used)
{
	return take_token_of(used, TOKEN_INTERVAL, TOKENS_IN_A_ROW);
}

#endif
