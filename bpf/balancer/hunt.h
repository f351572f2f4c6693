/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `hunt`: the servers decide. A SYN is offered to a few in turn, and the
 * one that takes it tells the balancer by its answer (stickiness.h). Until then
 * nothing of the flow is known here, so that a flood of SYNs leaves no trace.
 *
 * Desmouceaux et al., "6LB: Scalable and Application-Aware Load Balancing with
 * Segment Routing", 2018, sections II to IV; with random candidates "SRLB: The Power
 * of Choices in Load Balancing with Segment Routing", 2017.
 */
#ifndef SEGUE_BALANCER_HUNT_H
#define SEGUE_BALANCER_HUNT_H

#include "pending.h"
#include "persist.h"
#include "place.h"
#include "stats.h"

/* Which servers of a row are listed. */
enum listed {
	LIST_TAKING,	/* that take new flows */
	LIST_REACHABLE, /* whose next hop answers */
	LIST_ANY,
};

static __always_inline bool is_wanted(const struct service *service, __u32 number,
				      enum listed wanted)
{
	const struct server *server = server_at(number);

	if (!serves(server, service))
		return false;
	switch (wanted) {
	case LIST_TAKING:
		return takes_flows(server);
	case LIST_REACHABLE:
		return is_reachable(server);
	default:
		return true;
	}
}

static __always_inline bool is_listed(const struct segments *segments, __u32 number)
{
	for (__u32 i = 0; i < MAX_CANDIDATES && i < segments->count; i++) {
		if (segments->server[i] == number)
			return true;
	}
	return false;
}

/*
 * Appends the wanted servers of a row to the list, but those that are there already.
 * Not inlined: see steer_unusual.
 */
__noinline int list_row(const struct service *service, __u32 which, __u32 bucket, __u32 wanted,
			struct segments *segments)
{
	if (!service || !segments || !service->rule.buckets)
		return 0;
	for (__u32 i = 0; i < MAX_CANDIDATES && i < service->rule.candidates; i++) {
		__u32 count = segments->count, number;

		if (count >= MAX_CANDIDATES ||
		    !bucket_candidate(service, which, bucket, i, &number))
			break;
		if (is_listed(segments, number) || !is_wanted(service, number, wanted))
			continue;
		segments->server[count] = number;
		segments->count = count + 1;
	}
	return 0;
}

/* Says what is asked of the servers listed, and of the last of them. False when there are
 * none. */
static __always_inline bool ask_listed(struct segments *segments, enum sid_function each,
				       enum sid_function last)
{
	if (!segments->count)
		return false;
	segments->first_server = server_at(segments->server[0]);
	ask(segments, each, last);
	return true;
}

/*
 * Appends a flow's own candidates, which are the same on all balancers, and those that the
 * row had before the servers last changed: a flow from then may be there. What cannot be
 * reached comes last, for what others cannot be passed the packet by; but it is not left
 * out, or the one before would be the last and reset what it does not have.
 */
static __always_inline void list_own(const struct flow_key *flow, const struct service *service,
				     struct segments *segments)
{
	__u32 bucket = bucket_of(flow, service->rule.buckets);

	list_row(service, TABLE_PRESENT, bucket, LIST_REACHABLE, segments);
	if (service->rule.table & RULE_FORMER)
		list_row(service, TABLE_FORMER, bucket, LIST_REACHABLE, segments);
	list_row(service, TABLE_PRESENT, bucket, LIST_ANY, segments);
}

/* Asks whose flow it is what does not speak for it. */
static __always_inline bool steer(const struct flow_key *flow, const struct service *service,
				  struct segments *segments)
{
	segments->count = 0;
	list_own(flow, service, segments);
	return ask_listed(segments, SID_STEER, SID_STEER);
}

/* How many segments a packet may visit and still not be too long for its way. */
static __always_inline __u32 most_segments(const struct packet *pkt, const struct service *service,
					   const struct server *first)
{
	bool is_inserted = service->rule.encapsulation == ENCAP_SRV6_INSERT;
	/* Of a list of two or more, what does not grow with it. */
	int fixed = is_inserted ? srh_size(2) : sizeof(struct ipv6hdr) + srh_size(0) - SEGMENT_SIZE;
	int room = port_at(NEXT_HOP_PORT(first->next_hop))->mtu - (int)pkt->length - fixed;

	if (room < 2 * (int)SEGMENT_SIZE)
		return 1;
	return room < (int)(MAX_CANDIDATES * SEGMENT_SIZE) ? room / SEGMENT_SIZE : MAX_CANDIDATES;
}

/* Begins the list with the server of a flow's entry, if it can be reached. False when there is
 * no such server. */
static __always_inline bool list_holder(const struct service *service,
					const struct flow_slot *entry, struct segments *segments)
{
	bool is_held = recall(service, entry, segments);

	segments->count = is_held && is_reachable(segments->first_server);
	return is_held;
}

/* Ends the list with the server of a flow's entry, which takes what nobody else does; where it
 * leads the list as well there are others in between, or it is alone. */
static __always_inline void end_with(struct segments *segments, __u32 holder, __u32 most)
{
	__u32 last = segments->count < most ? segments->count : most - 1;

	if (last == 1 && segments->server[0] == holder)
		last = 0;
	segments->server[last & (MAX_CANDIDATES - 1)] = holder;
	segments->count = last + 1;
}

/*
 * Asks whose flow it is. An entry that nobody has used for long (is_stale) is asked for first,
 * and if the flow is not there or with any candidate its server says so to the client, as
 * without the question. No packet becomes too long by that.
 */
static __always_inline bool seek(const struct packet *pkt, const struct service *service,
				 const struct flow_slot *entry, struct segments *segments)
{
	__u32 holder, most;

	if (!list_holder(service, entry, segments)) {
		list_own(&pkt->key, service, segments);
		return ask_listed(segments, SID_RECOVER, SID_RECOVER);
	}
	list_own(&pkt->key, service, segments);
	holder = flow_server(entry->value);
	most = most_segments(pkt, service,
			     server_at(segments->count ? segments->server[0] : holder));
	end_with(segments, holder, most);
	return ask_listed(segments, SID_RECOVER, SID_ACK);
}

/*
 * Begins the list with the server of an entry that takes no new connection, but may have this
 * one: a SYN may be late, or a stranger's.
 */
static __always_inline void list_drained(const struct service *service,
					 const struct flow_slot *entry, struct segments *segments)
{
	if (!list_holder(service, entry, segments) || is_over(entry->value) ||
	    segments->first_server->flags & SERVER_FAILING)
		segments->count = 0;
}

/*
 * Offers a new connection to candidates; the last one has to take it, and so is not one that
 * cannot be reached or takes no new flows, unless all are like that. A server that may have the
 * connection is asked for it first, also where there is none to offer it to; if it is the only
 * candidate, it has to take it as any other would.
 */
static __always_inline bool offer(const struct flow_key *flow, const struct service *service,
				  const struct flow_slot *entry, struct segments *segments)
{
	__u32 buckets = service->rule.buckets;
	__u32 bucket = bucket_of(flow, buckets), drained;

	if (placement_of(service) == PLACEMENT_HUNT_RANDOM)
		bucket = (__u64)bpf_get_prandom_u32() * buckets >> 32;
	list_drained(service, entry, segments);
	drained = segments->count;
	list_row(service, TABLE_PRESENT, bucket, LIST_TAKING, segments);
	if (segments->count == drained)
		list_row(service, TABLE_PRESENT, bucket, LIST_ANY, segments);
	if (!ask_listed(segments, SID_CONNECT_AVAIL, SID_CONNECT_FORCE))
		return false;
	if (drained && (segments->count > drained || !buckets))
		segments->first_sid = SID_LOW(SID_STEER);
	return true;
}

/*
 * The server that a flow's SYN was offered to first, where the bucket says it and nothing has
 * changed since; negative: there is none. Not inlined: see steer_unusual.
 */
__noinline int first_offered(const struct service *service, const struct flow_key *flow)
{
	__u32 bucket;

	if (!service || !flow || !service->rule.buckets || placement_of(service) != PLACEMENT_HUNT)
		return -1;
	bucket = bucket_of(flow, service->rule.buckets);
	for (__u32 i = 0; i < MAX_CANDIDATES && i < service->rule.candidates; i++) {
		__u32 number;

		if (!bucket_candidate(service, TABLE_PRESENT, bucket, i, &number))
			break;
		if (is_wanted(service, number, LIST_TAKING))
			return number;
	}
	return -1;
}

/* Renews an entry that nobody could be asked about: there is no other candidate, or no room in
 * the packet to ask. Else a long upload would never, and its entry be taken for an idle one. */
static __always_inline void renew_unasked(const struct packet *pkt, struct flow_slot *flow,
					  const struct segments *segments)
{
	if (segments->count == 1 && flow_known(flow) &&
	    segments->server[0] == flow_server(flow->value))
		flow_touch(flow, next_state(pkt, flow_state(flow->value)), flow_now());
}

/* The client has answered the server: from now on the flow is known. */
static __always_inline enum lb_reason confirm(const struct packet *pkt, struct flow_slot *flow,
					      const struct flow_slot *half, __u32 server)
{
	enum flow_state state = ends_connection(pkt) ? FLOW_CLOSING : FLOW_ESTABLISHED;

	if (!flow_insert(flow, server, state, flow_now()))
		return LB_FORWARD_NO_ROOM;
	pending_remove(half);
	return LB_FORWARD_NEW;
}

/* Goes on with a half-open flow. None where there is no such, or it has to begin again. */
static __always_inline enum lb_reason go_on(const struct packet *pkt, const struct service *service,
					    struct flow_slot *flow, const struct flow_slot *half,
					    struct segments *segments)
{
	if (!flow_known(half) || !keep(pkt, service, half->value, segments))
		return LB_NONE;
	ask(segments, SID_ACK, SID_ACK);
	if (starts_connection(pkt))
		return LB_FORWARD_KNOWN;
	return confirm(pkt, flow, half, segments->server[0]);
}

/* The same for a service that has ceased to hunt. */
static __always_inline enum lb_reason finish_hunt(const struct packet *pkt,
						  const struct service *service,
						  struct flow_slot *flow, struct segments *segments)
{
	struct flow_slot half;

	if (!(service->rule.table & RULE_HUNTED))
		return LB_NONE;
	pending_lookup(flow, &half);
	return go_on(pkt, service, flow, &half, segments);
}

/* Finds the servers of a flow that the flow table does not know for sure: the one that
 * has answered its SYN, or else candidates. */
static __always_inline enum lb_reason hunt(const struct packet *pkt, const struct service *service,
					   struct flow_slot *flow, struct segments *segments)
{
	struct flow_slot half;
	enum lb_reason why;

	pending_lookup(flow, &half);
	why = go_on(pkt, service, flow, &half, segments);
	if (why)
		return why;
	if (starts_connection(pkt) && flow_known(flow) &&
	    keep(pkt, service, flow->value, segments)) /* for its server to judge */
		return LB_FORWARD_KNOWN;
	if (starts_connection(pkt))
		return offer(&pkt->key, service, flow_known(flow) ? flow : &half, segments)
			       ? LB_FORWARD_HUNT
			       : LB_DROP_NO_SERVER;
	if (!seek(pkt, service, flow, segments))
		return LB_DROP_NO_SERVER;
	renew_unasked(pkt, flow, segments);
	return LB_FORWARD_RECOVER;
}

#endif
