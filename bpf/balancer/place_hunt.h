/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Placement `hunt`: the servers decide. A SYN is offered to a few candidates in turn, and the one
 * that takes the connection tells the balancer by its answer (signals.h).
 *
 * Desmouceaux et al., "6LB: Scalable and Application-Aware Load Balancing with
 * Segment Routing", 2018, sections II to IV; with random candidates "SRLB: The Power
 * of Choices in Load Balancing with Segment Routing", 2017.
 */
#ifndef SEGUE_BALANCER_PLACE_HUNT_H
#define SEGUE_BALANCER_PLACE_HUNT_H

#include "candidates.h"
#include "segments.h"

/* Which servers of a row to list. */
enum listed {
	LIST_TAKING,	/* servers that take new flows */
	LIST_REACHABLE, /* servers whose next hop answers */
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

/* Appends the wanted servers of a row to the list, without duplicates. Not inlined: see
 * handle_in_full. */
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

/* Says what is asked of each listed server, and of the last. False when the list is empty. */
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
 * Appends a flow's own candidates, which are the same on all balancers, and the candidates from
 * before the servers last changed, which may have an older flow. Servers that cannot be reached
 * come last, because they cannot pass the packet on. They are not left out: otherwise the server
 * before them would be the last, and would reset a connection that it does not have.
 */
static __always_inline void list_own(const struct flow_key *flow, const struct service *service,
				     struct segments *segments)
{
	__u32 bucket = bucket_of(flow, service->rule.buckets);

	list_row(service, TABLE_PRESENT, bucket, LIST_REACHABLE, segments);
	if (service->rule.flags & RULE_FORMER)
		list_row(service, TABLE_FORMER, bucket, LIST_REACHABLE, segments);
	list_row(service, TABLE_PRESENT, bucket, LIST_ANY, segments);
}

/* Sends a fragment or an ICMP error of an unknown flow through the flow's candidates: any of them
 * may have it. */
static __always_inline bool visit_candidates(const struct flow_key *flow,
					     const struct service *service,
					     struct segments *segments)
{
	segments->count = 0;
	list_own(flow, service, segments);
	return ask_listed(segments, SID_STEER, SID_STEER);
}

/* The most segments that a packet can visit without becoming too long for its path. */
static __always_inline __u32 most_segments(const struct packet *pkt, const struct service *service,
					   const struct server *first)
{
	bool is_inserted = service->rule.encapsulation == ENCAP_SRV6_INSERT;
	/* Bytes of a list of two or more segments that do not depend on their number. */
	int fixed = is_inserted ? srh_size(2) : sizeof(struct ipv6hdr) + srh_size(0) - SEGMENT_SIZE;
	int room = port_at(NEXT_HOP_PORT(first->next_hop))->mtu - (int)pkt->length - fixed;

	if (room < 2 * (int)SEGMENT_SIZE)
		return 1;
	return room < (int)(MAX_CANDIDATES * SEGMENT_SIZE) ? room / SEGMENT_SIZE : MAX_CANDIDATES;
}

/* Begins the list with the flow's holder, if it can be reached. */
static __always_inline void list_holder(int holder, struct segments *segments)
{
	segments->count = 0;
	if (holder < 0 || !is_reachable(server_at(holder)))
		return;
	segments->server[0] = holder;
	segments->count = 1;
}

/* Ends the list with the holder. If the holder is also the first of the list, then it has other
 * servers behind it, or it is alone. */
static __always_inline void end_with(struct segments *segments, __u32 holder, __u32 most)
{
	__u32 last = segments->count < most ? segments->count : most - 1;

	if (last == 1 && segments->server[0] == holder)
		last = 0;
	segments->server[last & (MAX_CANDIDATES - 1)] = holder;
	segments->count = last + 1;
}

/*
 * Asks the candidates for a connection that one of them may have. The holder, if there is one, is
 * asked first and last: if no server has the connection, the holder resets it, as if nobody else
 * had been asked. The list is never so long that the packet does not fit its path.
 */
static __always_inline bool seek(const struct packet *pkt, const struct service *service,
				 int holder, struct segments *segments)
{
	__u32 most;

	list_holder(holder, segments);
	list_own(&pkt->key, service, segments);
	if (holder < 0)
		return ask_listed(segments, SID_RECOVER, SID_RECOVER);
	most = most_segments(pkt, service,
			     server_at(segments->count ? segments->server[0] : (__u32)holder));
	end_with(segments, holder, most);
	return ask_listed(segments, SID_RECOVER, SID_ACK);
}

/*
 * Offers a new connection to candidates. The last candidate has to accept it. So servers that
 * cannot be reached or take no new flows are not listed, unless all candidates are like that. The
 * holder is asked first whether it has the connection, also if there are no candidates. If the
 * holder is the only candidate, it has to accept the connection as any other would.
 */
static __always_inline bool offer(const struct flow_key *flow, const struct service *service,
				  int holder, struct segments *segments)
{
	__u32 buckets = service->rule.buckets;
	__u32 bucket = bucket_of(flow, buckets), held;

	if (placement_of(service) == PLACEMENT_HUNT_RANDOM)
		bucket = (__u64)bpf_get_prandom_u32() * buckets >> 32;
	list_holder(holder, segments);
	held = segments->count;
	list_row(service, TABLE_PRESENT, bucket, LIST_TAKING, segments);
	if (segments->count == held)
		list_row(service, TABLE_PRESENT, bucket, LIST_ANY, segments);
	if (!ask_listed(segments, SID_CONNECT_AVAIL, SID_CONNECT_FORCE))
		return false;
	if (held && (segments->count > held || !buckets))
		segments->first_sid = SID_LOW(SID_STEER);
	return true;
}

static __always_inline bool place_hunt(const struct packet *pkt, const struct service *service,
				       int holder, struct segments *segments)
{
	if (starts_connection(pkt))
		return offer(&pkt->key, service, holder, segments);
	return seek(pkt, service, holder, segments);
}

/*
 * The server that a flow's SYN was offered to first, where the bucket tells and nothing has
 * changed since; negative: there is none. Not inlined: see handle_in_full.
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

#endif
