/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flows of services without a flow table, as placement `infer` observes them. A table in the
 * format of the flow table (flowtable.h) knows some of them, so that the loads of servers are
 * known. No packet finds its server here. So a flow that finds no room, or loses its entry, makes a
 * load less accurate, and costs no connection.
 *
 * Most packets do not look here. Only SYNs, packets with the flag PSH (which ends a request), and
 * packets with FIN or RST do.
 */
#ifndef SEGUE_BALANCER_PERSIST_OBSERVED_H
#define SEGUE_BALANCER_PERSIST_OBSERVED_H

#include "balancer/persist/table.h"

/* Whether the service's flows are observed here. */
static __always_inline bool is_observed(const struct service *service)
{
	return has_features(PERSISTENCES_WITHOUT_TABLE) &&
	       places_by(service, PLACEMENT_BIT(PLACEMENT_INFER_ROW)) &&
	       !persists_by(service, PERSISTENCE_TABLE);
}

/* Looks up a flow of an observed service. */
static __always_inline void observed_lookup(const struct packet *pkt, const struct service *service,
					    struct flow *flow)
{
	__u32 number;

	flow_identify(flow, &pkt->key, service->vip_id);
	number = flow->place >> observed_bucket_shift;
	flow->bucket = bpf_map_lookup_elem(&observed, &number);
	flow_search(flow);
}

/* Enters a new flow of an observed service that is placed on a server. A SYN soon after another
 * packet of the client begins no new flow: a FIN or RST in between may be forged. Not inlined: see
 * handle_in_full. */
__noinline int observe_new(const struct packet *pkt, const struct service *service, __u32 server)
{
	struct flow flow;
	__u64 now;

	if (!pkt || !service || dry_run || !starts_connection(pkt))
		return 0;
	observed_lookup(pkt, service, &flow);
	now = flow_now();
	if (!flow_is_recent(&flow, now) && flow_enter(&flow, server, FLOW_NEW, now, false) &&
	    has_features(FEATURE_BIT(FEATURE_PACKET_TIMES)))
		time_first_packet(flow.signature, server);
	return 0;
}

/* Notes a later packet of a flow of an observed service. Not inlined: see handle_in_full. */
__noinline int observe_packet(const struct packet *pkt, const struct service *service)
{
	struct flow flow;

	if (!pkt || !service || dry_run || pkt->kind != PACKET_WHOLE || starts_connection(pkt))
		return 0;
	observed_lookup(pkt, service, &flow);
	if (!flow_known(&flow))
		return 0;
	if (has_features(FEATURE_BIT(FEATURE_PACKET_TIMES)))
		time_packet(flow.value, event_of(pkt));
	flow_renew(&flow, event_of(pkt), flow_now());
	return 0;
}

#endif
