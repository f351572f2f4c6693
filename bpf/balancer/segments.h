/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The servers that a packet visits, as a list. Persistence and placement both return this list, so
 * encapsulation need not know which of the two decided.
 */
#ifndef SEGUE_BALANCER_SEGMENTS_H
#define SEGUE_BALANCER_SEGMENTS_H

#include "balancer/tables/maps.h"
#include "net/load.h"
#include "net/srv6.h"
#include "balancer/tables/services.h"

/*
 * The field `columns` of a list has four bits for each server, from server 0 in the lowest bits on.
 * They are the four highest bits of the argument of the server's SID in an offer (net/load.h).
 * Lists other than offers can be longer, and all of their bits are 0.
 */
#define COLUMN_BITS 4
#define COLUMN_MASK ((1 << COLUMN_BITS) - 1)
#define COLUMN(column) ((column) << 1)
#define NO_COLUMN 1
#define ALL_NO_COLUMN 0x11111111
#define ROW_COLUMNS 0xeca86420 /* COLUMN(i) of each server i */

/* Limits the index of a server in a list, for the verifier. */
#define SEGMENTS_MASK 0xf

/* A list of servers, in order of travel. */
struct segments {
	__u32 count;
	__u16 server[SEGMENTS_MASK + 1];
	/* What is asked (SID_LOW) of the first server, of each other server, and of the last one if
	 * there are several. first_sid includes the argument. 0 stands for the first server's
	 * known_sid, which is then read only when the SID is written. */
	__u32 first_sid, sid, last_sid;
	__u32 columns;
	/* Whether the routing header has to contain all servers, because servers write into their
	 * own entries. If not, an encapsulation may leave out the first server. */
	bool keeps_whole;
	__u8 pad[3];
	const struct server *first_server; /* server[0] */
};

/* The argument of a server's SID in an offer, as bits to add to SID_LOW. */
static __always_inline __u64 argument_of(const struct segments *segments, __u32 i)
{
	__u64 column = (__u64)segments->columns >> i * COLUMN_BITS & COLUMN_MASK;

	return bpf_cpu_to_be64(column << (LOAD_COLUMN_SHIFT - 1));
}

/* Says what is asked of each server, and of the last. A single server is the last one. */
static __always_inline void ask(struct segments *segments, enum sid_function each,
				enum sid_function last)
{
	segments->first_sid =
		(segments->count > 1 ? SID_LOW(each) : SID_LOW(last)) | argument_of(segments, 0);
	segments->sid = SID_LOW(each);
	segments->last_sid = SID_LOW(last);
}

/* Makes a server the only segment, as for a packet of a known flow. */
static __always_inline void go_to(struct segments *segments, __u32 number,
				  const struct server *server)
{
	segments->count = 1;
	segments->first_sid = 0;
	segments->server[0] = number;
	segments->first_server = server;
}

/* Whether a slot has a server of the service, now. */
static __always_inline bool serves(const struct server *server, const struct service *service)
{
	return server->flags & SERVER_IN_USE && server->service == service->id;
}

/* Whether a server is of the service, does not fail, is not leaving (SERVER_LEAVING), and has a
 * next hop that is not known to be unreachable. */
static __always_inline bool is_well(const struct server *server, const struct service *service)
{
	const __u32 mask = SERVER_IN_USE | SERVER_FAILING | SERVER_UNREACHABLE | SERVER_LEAVING;

	return (server->flags & mask) == SERVER_IN_USE && server->service == service->id &&
	       server->next_hop;
}

/* Whether a server is of the service, and takes new flows. Flags and service are read as one word,
 * because packets ask this about all servers of a row. */
static __always_inline bool takes_flows_of(const struct server *server,
					   const struct service *service)
{
	const __u64 mask = ~0ULL << 32 | SERVER_IN_USE | SERVER_DRAINED | SERVER_FAILING;

	return (*(const __u64 *)&server->flags & mask) ==
	       ((__u64)service->id << 32 | SERVER_IN_USE);
}

/* Whether a server's next hop is known, and answers. */
static __always_inline bool is_reachable(const struct server *server)
{
	return server->next_hop && !(server->flags & SERVER_UNREACHABLE);
}

/* Whether the server is unfit for one reason alone: offers to it are not answered. */
static __always_inline bool is_only_unheard(const struct server *server)
{
	const __u32 causes = SERVER_CHECKS_FAIL | SERVER_SILENT | SERVER_INCOMPATIBLE |
			     SERVER_NOT_SERVED | SERVER_REFUSING | SERVER_UNHEARD;

	return (server->flags & causes) == SERVER_UNHEARD;
}

/* Whether new flows are placed on a server. User space decides, because it sees all servers of the
 * service: if all are unfit, all take new flows. */
static __always_inline bool takes_flows(const struct server *server)
{
	return !(server->flags & (SERVER_DRAINED | SERVER_FAILING));
}

#endif
