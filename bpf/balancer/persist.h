/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Persistence: how the packets of a flow that was placed find its server again.
 */
#ifndef SEGUE_BALANCER_PERSIST_H
#define SEGUE_BALANCER_PERSIST_H

#include "flowtable.h"
#include "maps.h"
#include "net/parse.h"
#include "place.h"

/* Opens a connection: nothing of the flow can be known by right. */
static __always_inline bool starts_connection(const struct packet *pkt)
{
	return (pkt->tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

static __always_inline bool ends_connection(const struct packet *pkt)
{
	return pkt->tcp_flags & (TCP_FIN | TCP_RST);
}

/* Neither opens nor ends a connection, as most packets. */
static __always_inline bool is_plain(const struct packet *pkt)
{
	return !(pkt->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST));
}

/* What a connection still sends after the client's FIN or RST comes within this
 * time, in ticks: one tick and what is left of another. */
#define FLOW_LINGER 2

/*
 * Whether a packet after a FIN or RST tells nothing: it may belong to the end. The
 * entry keeps the time of the FIN, so that later ones can tell more.
 */
static __always_inline bool lingers(const struct packet *pkt, __u64 value, __u64 now)
{
	return flow_state(value) == FLOW_CLOSING && !ends_connection(pkt) &&
	       !starts_connection(pkt) && flow_age(value, now) < FLOW_LINGER;
}

/* Whether nothing of an entry's connection is on its way any more: before, a SYN may be
 * a late copy of its own, and another server would reset what the client has. */
static __always_inline bool is_over(__u64 value)
{
	return flow_state(value) == FLOW_CLOSING && flow_age(value, flow_now()) >= FLOW_LINGER;
}

/*
 * What a flow's entry says after another packet of it. A repeated SYN confirms
 * nothing, or a flood of them would; every other second packet does. So does one
 * that comes long after a FIN or RST: that was half a close, or a stranger's.
 */
static __always_inline enum flow_state next_state(const struct packet *pkt, enum flow_state state)
{
	if (ends_connection(pkt))
		return FLOW_CLOSING;
	if (starts_connection(pkt))
		return state == FLOW_CLOSING ? FLOW_NEW : state;
	return FLOW_ESTABLISHED;
}

/* Loses nothing by another server: opens a connection, or knows none. */
static __always_inline bool may_move(const struct packet *pkt)
{
	return starts_connection(pkt) || pkt->key.protocol != IPPROTO_TCP;
}

/* Whether it is a server of the service, now. */
static __always_inline bool serves(const struct server *server, const struct service *service)
{
	return server->flags & SERVER_IN_USE && server->service == service->id;
}

/* Whether it serves, and can be reached as far as is known. */
static __always_inline bool is_well(const struct server *server, const struct service *service)
{
	return (server->flags & (SERVER_IN_USE | SERVER_FAILING | SERVER_UNREACHABLE)) ==
		       SERVER_IN_USE &&
	       server->service == service->id && server->next_hop;
}

/* Whether its next hop is known, and answers. */
static __always_inline bool is_reachable(const struct server *server)
{
	return server->next_hop && !(server->flags & SERVER_UNREACHABLE);
}

static __always_inline bool takes_flows(const struct server *server)
{
	return is_reachable(server) && !(server->flags & (SERVER_DRAINED | SERVER_FAILING));
}

/*
 * A flow stays with its server as long as that is configured. A new connection
 * that reuses the ports of one that is over, or whose server is drained, is placed
 * afresh, and so is whatever may move while its server cannot be reached. A
 * server of another service is the mark of a signature that two flows share:
 * those never meet.
 */
static __always_inline bool keeps_server(const struct packet *pkt, const struct service *service,
					 const struct server *server, __u64 value)
{
	if (!serves(server, service))
		return false;
	if (may_move(pkt) && (server->flags & SERVER_FAILING || !is_reachable(server)))
		return false;
	return !starts_connection(pkt) || (!(server->flags & SERVER_DRAINED) && !is_over(value));
}

/* Makes a server the only segment, and asks it for what known flows are asked. */
static __always_inline void go_to(struct segments *segments, __u32 number,
				  const struct server *server)
{
	segments->count = 1;
	segments->first_sid = 0;
	segments->server[0] = number;
	segments->first_server = server;
}

/* Makes the server of an entry the only segment, if the packet is to stay with it. */
static __always_inline bool keep(const struct packet *pkt, const struct service *service,
				 __u64 value, struct segments *segments)
{
	__u32 number = flow_server(value);
	const struct server *server = server_at(number);

	if (!keeps_server(pkt, service, server, value))
		return false;
	go_to(segments, number, server);
	return true;
}

/*
 * Whether an entry that was idle for so long proves nothing, where servers can be asked: the
 * flow may have moved to another balancer, ended there, and be back as another connection,
 * with another server. Clients do not use a port again any sooner, as a rule.
 */
static __always_inline bool is_stale(const struct service *service, __u64 value, __u64 now)
{
	return hunts(service) && flow_age(value, now) >= FLOW_MIN_IDLE;
}

/* Notes what the packet tells of its flow. False when the entry is stale: no packet of the
 * client's renews it (hunt.h). */
static __always_inline bool renew(const struct packet *pkt, const struct service *service,
				  struct flow_slot *slot, __u64 now)
{
	if (lingers(pkt, slot->value, now))
		return true;
	if (is_stale(service, slot->value, now))
		return false;
	flow_touch(slot, next_state(pkt, flow_state(slot->value)), now);
	return true;
}

/* Fills in the server of a known flow; false: place it. */
static __always_inline bool persist(const struct packet *pkt, const struct service *service,
				    struct flow_slot *slot, struct segments *segments)
{
	flow_lookup(&pkt->key, service->id, slot);
	return flow_known(slot) && keep(pkt, service, slot->value, segments) &&
	       renew(pkt, service, slot, flow_now());
}

/* The same for a plain packet, as long as its server is well: then none of them moves. */
static __always_inline bool persist_plain(const struct packet *pkt, const struct service *service,
					  struct flow_slot *slot, struct segments *segments)
{
	const struct server *server;
	__u64 now;

	flow_lookup(&pkt->key, service->id, slot);
	if (!flow_known(slot))
		return false;
	server = server_at(flow_server(slot->value));
	if (!is_well(server, service))
		return false;
	go_to(segments, flow_server(slot->value), server);
	now = flow_now();
	return flow_is_fresh(slot->value, now) || renew(pkt, service, slot, now);
}

/* Makes the server of an entry the only segment for a packet that does not speak for the
 * flow, and may be anybody's. False when there is none. */
static __always_inline bool recall(const struct service *service, const struct flow_slot *slot,
				   struct segments *segments)
{
	__u32 number = flow_server(slot->value);
	const struct server *server;

	if (!flow_known(slot))
		return false;
	server = server_at(number);
	if (!serves(server, service))
		return false;
	segments->count = 1;
	segments->server[0] = number;
	segments->first_server = server;
	ask(segments, SID_DELIVER, SID_DELIVER);
	return true;
}

/* Remembers where a flow was placed. A flow that finds no room is placed again
 * by every packet of it, and still keeps its server while the table does. */
static __always_inline bool remember(const struct packet *pkt, struct flow_slot *slot,
				     const struct segments *segments)
{
	return flow_insert(slot, segments->server[0],
			   ends_connection(pkt) ? FLOW_CLOSING : FLOW_NEW, flow_now());
}

#endif
