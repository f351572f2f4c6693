/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A token bucket that limits the work that strangers can cause on a core. A program defines
 * `dry_run` before it includes this header.
 */
#ifndef SEGUE_NET_TOKEN_H
#define SEGUE_NET_TOKEN_H

#include "types.h"

/*
 * The rate and the burst of a core's token bucket for answers. Clients have no reason to cause more
 * answers. An answer takes a few microseconds, so 1000 a second take less than a hundredth of a
 * core. Linux sends as many ICMP errors (net.ipv4.icmp_msgs_per_sec), though for a whole host.
 */
#define TOKENS_PER_SECOND 1000
#define TOKEN_BURST 100
#define TOKEN_INTERVAL (1000000000ULL / TOKENS_PER_SECOND) /* ns */

/* Takes a token; false: there is none. A new token arrives every `interval` ns, and a bucket holds
 * at most `burst` tokens. `*used` is a time in ns of the coarse monotonic clock: all tokens that
 * arrived up to then are used. `used` is NULL if the bucket was not found. A dry run takes no
 * token, and tells whether there is one. */
static __always_inline bool take_token_of(__u64 *used, __u64 interval, __u64 burst)
{
	__u64 now = bpf_ktime_get_coarse_ns();
	__u64 full = now - burst * interval, copy;

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

/* Takes a token from a bucket with the rate above. */
static __always_inline bool take_token(__u64 *used)
{
	return take_token_of(used, TOKEN_INTERVAL, TOKEN_BURST);
}

#endif
