/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Dry runs. `segue trace` runs the data path on one packet, on the tables of the attached program.
 * It needs to know why the data path decides as it does, and the tables must not change. So the
 * source is compiled a second time, with DRY_RUN. That program writes to no shared table, and notes
 * its decision here. In the attached program, dry_run is false and the compiler removes all notes.
 */
#ifndef SEGUE_BALANCER_DECISION_H
#define SEGUE_BALANCER_DECISION_H

#include "net/srv6.h"
#include "balancer/types.h"

/* Why a packet leaves the server of its flow's entry. */
enum departure {
	STAYS,
	LEAVES_REMOVED,	      /* the server is not configured any more */
	LEAVES_OTHER_SERVICE, /* the server is another service's: two flows share a signature */
	LEAVES_FAILING,
	LEAVES_NO_NEXT_HOP,
	LEAVES_UNREACHABLE,
	LEAVES_OVER, /* the entry's connection is over, and this is a new one */
	LEAVES_DRAINED,
	LEAVES_STALE, /* the entry was idle for so long that it proves nothing */
};

/* An entry of the flow table or of the table of half-open flows. */
struct decided_entry {
	__u32 server; /* its slot */
	__u16 age;    /* ticks since the last packet */
	__u8 state;   /* enum flow_state; FLOW_FREE: the flow has no entry */
	__u8 departure;
	__u8 is_half_open; /* it is in the table of half-open flows */
	__u8 pad[3];
};

/* A server that the packet visits. */
struct decided_segment {
	__u64 argument; /* of its SID, with the column of an offer (net/load.h) */
	__u32 server;	/* its slot */
	__u32 function; /* enum sid_function; gre and ipip have none */
};

/* Where the packet's flow is placed if no server has it. This is noted if the flow is placed, and
 * for every packet of a service whose servers answer offers. */
struct decided_placement {
	__u32 bucket;
	__u32 count; /* of candidates */
	__u32 candidate[MAX_SEGMENTS];
	__u8 is_placed; /* the other fields are valid */
	__u8 is_random; /* these are the candidates of a random bucket */
	__u8 is_picked; /* the placement has picked a server, whatever the flow's bucket is */
	__u8 ordered;	/* how many servers were ordered by their loads (order.h); 0: none */
	__u16 row[MAX_CANDIDATES];	/* slots of these servers, before they were ordered */
	__u32 estimate[MAX_CANDIDATES]; /* estimates of their loads, with ESTIMATE_SHIFT */
	__u32 mean;			/* of the service's reports, with ESTIMATE_SHIFT */
};

/* The decision about a packet. Fields of steps that the packet does not reach are 0. */
struct decision {
	struct service_rule rule; /* of its service */
	__u32 service;		  /* the id of its service */
	__u32 reason;		  /* enum lb_reason: what it is counted as */
	struct decided_entry entry;
	struct decided_placement placement;
	__u16 added; /* bytes of the encapsulation */
	__u16 mtu;   /* bytes of layer 3 that the interface takes; 0: there is no next hop */
	__u32 count; /* of segments */
	struct decided_segment segment[MAX_SEGMENTS];
	__u8 has_service;
	__u8 is_exact; /* the service names the port; else it has all other ports */
	__u16 hint;    /* of the flow (hints.h); 0: none */
	__u8 has_cookie;
	__u8 column; /* in the packet's cookie */
	__u8 pad[2];
};

extern struct decision decision;

/*
 * The length of the packet in bytes of layer 3, if the frame holds only its beginning; 0: the frame
 * holds all of it. A test run of the kernel takes at most a page.
 */
extern volatile __u16 whole_length;

#ifdef DRY_RUN
#define dry_run true
struct decision decision;
volatile __u16 whole_length;
#else
#define dry_run false
#endif

/* Notes what the packet is counted as, instead of counting it. */
static __always_inline void note_reason(__u32 reason)
{
	if (dry_run)
		decision.reason = reason;
}

static __always_inline void note_departure(enum departure departure)
{
	if (dry_run)
		decision.entry.departure = departure;
}

static __always_inline void note_half_open(void)
{
	if (dry_run)
		decision.entry.is_half_open = true;
}

static __always_inline void note_hint(__u32 value)
{
	if (dry_run)
		decision.hint = value;
}

static __always_inline void note_cookie(__u32 column)
{
	if (dry_run) {
		decision.has_cookie = true;
		decision.column = column;
	}
}

/* Notes that the packet's flow is placed. */
static __always_inline void note_placed(void)
{
	if (dry_run)
		decision.placement.is_placed = true;
}

/* Notes that the candidates are those of a random bucket. The next packet gets others. */
static __always_inline void note_random(void)
{
	if (dry_run)
		decision.placement.is_random = true;
}

/* Notes whether the placement has picked the server, and not the flow's bucket. */
static __always_inline void note_pick(bool is_picked)
{
	if (dry_run)
		decision.placement.is_picked = is_picked;
}

#endif
