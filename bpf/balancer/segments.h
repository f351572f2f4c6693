/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The servers that a packet visits. Persistence and placement answer with them, so that
 * encapsulation need not know which of the two decided.
 */
#ifndef SEGUE_BALANCER_SEGMENTS_H
#define SEGUE_BALANCER_SEGMENTS_H

#include "maps.h"
#include "net/srv6.h"
#include "services.h"

/* In order of travel. */
struct segments {
	__u32 count;
	__u32 server[MAX_CANDIDATES];
	/* SID_LOW of what is asked of the first server, and of the others and the last, if there
	 * are any. Of the first, 0 stands for its known_sid, which is then loaded no sooner than it
	 * is written. */
	__u32 first_sid, sid, last_sid;
	const struct server *first_server; /* server[0] */
};

/* Says what is asked of each server, and of the last. A single server is the last one. */
static __always_inline void ask(struct segments *segments, enum sid_function each,
				enum sid_function last)
{
	segments->first_sid = segments->count > 1 ? SID_LOW(each) : SID_LOW(last);
	segments->sid = SID_LOW(each);
	segments->last_sid = SID_LOW(last);
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

/* Whether the server is unfit for one reason alone: offers to it are not answered. */
static __always_inline bool is_only_unheard(const struct server *server)
{
	const __u32 causes = SERVER_CHECKS_FAIL | SERVER_SILENT | SERVER_INCOMPATIBLE |
			     SERVER_NOT_SERVED | SERVER_UNHEARD;

	return (server->flags & causes) == SERVER_UNHEARD;
}

/* Whether new flows are placed on it. User space decides, because it sees all servers of the
 * service: if all are unfit, all take new flows. */
static __always_inline bool takes_flows(const struct server *server)
{
	return !(server->flags & (SERVER_DRAINED | SERVER_FAILING));
}

#endif
