/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `hash`: the first candidate of a flow's bucket gets the flow.
 */
#ifndef SEGUE_BALANCER_PLACE_HASH_H
#define SEGUE_BALANCER_PLACE_HASH_H

#include "candidates.h"
#include "segments.h"

/* False when the service has no server to place on. */
static __always_inline bool place_hash(const struct flow_key *flow, const struct service *service,
				       struct segments *segments)
{
	__u32 buckets = service->rule.buckets;

	if (!buckets)
		return false;
	segments->count = 1;
	ask(segments, SID_DELIVER, SID_DELIVER);
	if (!bucket_candidate(service, TABLE_PRESENT, bucket_of(flow, buckets), 0,
			      &segments->server[0]))
		return false;
	segments->first_server = server_at(segments->server[0]);
	return true;
}

#endif
