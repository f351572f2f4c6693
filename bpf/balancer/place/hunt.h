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

#include "balancer/place/order.h"
#include "net/underlay.h"

/* The most segments that a packet can visit without becoming too long for its path. `whole`: the
 * header contains all of them (keeps_whole). */
static __always_inline __u32 most_segments(const struct packet *pkt, const struct service *service,
					   const struct server *first, bool whole)
{
	bool is_inserted = service->rule.encapsulation == ENCAP_SRV6_INSERT;
	/* Bytes of a list of two or more segments that do not depend on their number. */
	int fixed = is_inserted ? srh_size(2)
				: sizeof(struct ipv6hdr) + srh_size(0) - (whole ? 0 : SEGMENT_SIZE);
	const int most = underlay_port ? MOST_UNDERLAID : MAX_SEGMENTS;
	int room = port_at(NEXT_HOP_PORT(first->next_hop))->mtu - (int)pkt->length - fixed -
		   (int)(underlay_port ? UNDERLAY_SIZE : 0);

	if (room < 2 * (int)SEGMENT_SIZE)
		return 1;
	return room < most * (int)SEGMENT_SIZE ? room / SEGMENT_SIZE : most;
}

/* Begins the list with the flow's holder, if it can be reached. The holder has no column. */
static __always_inline void list_holder(int holder, struct segments *segments)
{
	segments->count = 0;
	segments->columns = 0;
	if (holder < 0 || !is_reachable(server_at(holder)))
		return;
	segments->server[0] = holder;
	segments->columns = NO_COLUMN;
	segments->count = 1;
}

/* Shortens the list to less than `most` servers, and appends the holder. If the list would then be
 * the holder twice, it becomes the holder once. */
static __always_inline void end_with(struct segments *segments, __u32 holder, __u32 most)
{
	__u32 last = segments->count < most ? segments->count : most - 1;

	if (last == 1 && segments->server[0] == holder)
		last = 0;
	segments->server[last & SEGMENTS_MASK] = holder;
	segments->count = last + 1;
}

/*
 * Asks the candidates for a connection that one of them may have. The holder, if there is one, is
 * asked first and last: if no server has the connection, the holder resets it, as if it alone had
 * been asked. Then the list is also shortened until the packet fits its path. False: it is empty.
 */
static __always_inline bool seek(const struct packet *pkt, const struct service *service,
				 int holder, struct segments *segments)
{
	__u32 most;

	list_holder(holder, segments);
	list_possible(service, bucket_of(&pkt->key, service), segments);
	if (holder < 0)
		return ask_listed(segments, SID_RECOVER, SID_RECOVER);
	most = most_segments(pkt, service,
			     server_at(segments->count ? segments->server[0] : (__u32)holder),
			     false);
	end_with(segments, holder, most);
	return ask_listed(segments, SID_RECOVER, SID_ACK);
}

/* Leaves out the last candidates of an offer, until it has at most MAX_CANDIDATES servers and the
 * packet fits its path. The first candidate stays. In front of it are `holders` servers: 0 or 1. */
static __always_inline void shorten_offer(const struct packet *pkt, const struct service *service,
					  __u32 holders, struct segments *segments)
{
	const struct server *first = server_at(segments->server[0]);
	__u32 most;

	if (!first->next_hop) /* then it has no path */
		return;
	most = most_segments(pkt, service, first, true);
	if (most > MAX_CANDIDATES)
		most = MAX_CANDIDATES;
	if (segments->count > most)
		segments->count = most > holders ? most : holders + 1;
}

/* Whether the service's placement orders candidates by the loads that servers report. */
static __always_inline bool takes_reports(const struct service *service)
{
	return placement_of(service) == PLACEMENT_HUNT_REPORTS ||
	       placement_of(service) == PLACEMENT_HUNT_SPARE;
}

/* Appends the candidates for an offer to the list. Behind a holder, they are in the order of the
 * row. */
static __always_inline void list_candidates(const struct flow_key *flow,
					    const struct service *service,
					    struct segments *segments)
{
	__u32 bucket;

	if (placement_of(service) != PLACEMENT_HUNT_RANDOM) {
		bool is_empty = !segments->count;

		bucket = bucket_of(flow, service);
		if (stays_in_row(service))
			list_own_row(service, bucket, segments);
		else
			list_taking(service, bucket, segments);
		if (is_empty && takes_reports(service))
			order_by_reports(service, segments);
		if (is_empty && placement_of(service) == PLACEMENT_HUNT_SPARE)
			offer_spare(service, segments);
		return;
	}
	note_random();
	bucket = share_of(bpf_get_prandom_u32(), buckets_of(service));
	list_taking(service, bucket, segments);
	segments->columns = ALL_NO_COLUMN; /* the candidates are not of the flow's own row */
}

/* Asks the servers of an offer for load reports. */
static __always_inline void ask_for_reports(struct segments *segments)
{
	__u32 bit = bpf_cpu_to_be64(LOAD_WANTS_REPORT);

	segments->first_sid |= bit;
	segments->sid |= bit;
	segments->last_sid |= bit;
}

/*
 * Offers a new connection to servers that take new flows. The last of them has to accept it, or to
 * hand it back to a server with a lower load. So the list is kept whole, and all servers are asked
 * by connect-avail. If the list has a single server, that one has to accept the connection. The
 * holder is first asked whether it has the connection, even if no server takes new flows. If the
 * holder is the only server, it has to accept the connection as any other would.
 */
static __always_inline bool offer(const struct packet *pkt, const struct service *service,
				  int holder, struct segments *segments)
{
	__u32 holders;

	segments->keeps_whole = true;
	list_holder(holder, segments);
	holders = segments->count;
	list_candidates(&pkt->key, service, segments);
	if (pkt->is_single && segments->count > holders + 1)
		segments->count = holders + 1;
	shorten_offer(pkt, service, holders, segments);
	if (!ask_listed(segments, SID_CONNECT_AVAIL, SID_CONNECT_FORCE))
		return false;
	segments->last_sid = segments->sid; /* a list of one uses first_sid only */
	if (takes_reports(service))
		ask_for_reports(segments);
	/* The flow table or a hint names the holder. Later packets would go there first, whatever
	 * their cookie is. So a server that accepts the connection has to tell the balancer. */
	if (!holders)
		ask_for_cookie(pkt->cookie_width, segments);
	if (holders && (segments->count > holders || !(service->rule.flags & RULE_TAKES_FLOWS)))
		segments->first_sid = SID_LOW(SID_STEER);
	return true;
}

/* Whether servers decide about a packet. They know the connections of TCP, and those of QUIC that
 * have just begun. Other packets of QUIC name their server, or are placed by their bucket. */
static __always_inline bool is_hunted(const struct packet *pkt)
{
	return !has_features(PERSISTENCE_BIT(PERSISTENCE_QUIC)) || pkt->opens_quic ||
	       pkt->key.protocol == IPPROTO_TCP;
}

/* Offers a SYN, or an Initial or 0-RTT packet of QUIC, to servers, and seeks the server of any other
 * packet. */
static __always_inline bool place_hunt(const struct packet *pkt, const struct service *service,
				       int holder, struct segments *segments)
{
	if (starts_connection(pkt) || pkt->opens_quic)
		return offer(pkt, service, holder, segments);
	return seek(pkt, service, holder, segments);
}

/* The server that a flow's SYN was offered to first, as the report of the server that answers says.
 * Without a report, the answering server is taken to be the first. Negative: the report does not
 * tell, or the row has become shorter since the offer. */
static __always_inline int first_reported(const struct service *service, __u32 bucket, __u32 sender,
					  __u64 report)
{
	__u32 column = report >> REPORT_COLUMN_SHIFT & PLACE_MASK;
	__u32 first;

	if (!report || report & REPORT_IS_FIRST)
		return sender;
	if (report & REPORT_NO_COLUMN || column >= candidates_of(service))
		return -1;
	first = candidate_of(service, bucket, column);
	return serves(server_at(first), service) ? (int)first : -1;
}

/* The server that a flow's SYN was offered to first, if nothing has changed since; negative: that
 * server is not known. `sender` answers the SYN. Not inlined: see handle_in_full. */
__noinline int first_offered(const struct service *service, const struct flow_key *flow,
			     __u32 sender, __u64 report)
{
	__u32 bucket, number;

	if (!service || !flow)
		return -1;
	bucket = bucket_of(flow, service);
	if (takes_reports(service))
		return first_reported(service, bucket, sender, report);
	if (placement_of(service) != PLACEMENT_HUNT)
		return -1;
	number = candidate_of(service, bucket, 0);
	if (is_taking(service, number))
		return number;
	return search_first(service, bucket);
}

#endif
