/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The states of a flow, and the events that change them (docs/understand/flow-table.md).
 * flowtable.h has the entries that keep the states.
 */
#ifndef SEGUE_BALANCER_TABLES_FLOWSTATE_H
#define SEGUE_BALANCER_TABLES_FLOWSTATE_H

#include "net/types.h"

/* An entry has two bits for the state. They are 0 in the entry of a silent flow, as in a free
 * entry; but a free entry has no other bits either. They are 3 for closed and for closing flows,
 * which differ in FLOW_BY_CLIENT. */
enum flow_state {
	FLOW_FREE,
	FLOW_NEW, /* one packet seen: it may belong to a flood */
	FLOW_ESTABLISHED,
	FLOW_CLOSED, /* its server has signalled the end */
	/* Established, and silent for so long that it does not count as a load of its server. */
	FLOW_SILENT,
	/*
	 * Established, and the client has sent FIN or RST. That may be forged, because the balancer
	 * does not know sequence numbers. So the flow does not count as a load, but its entry has
	 * the life, the rank and the server of an established one.
	 */
	FLOW_CLOSING = 7,
};

/* How many states are counted: closing flows count as closed. */
#define COUNTED_FLOW_STATES (FLOW_SILENT + 1)

/* Whether the flow of a state has ended, as far as its server or its client says. */
static __always_inline bool has_ended(enum flow_state state)
{
	return state == FLOW_CLOSING || state == FLOW_CLOSED;
}

/* What happens to a flow. */
enum flow_event {
	FLOW_OPENS,	/* a SYN: nothing confirms that the client is there */
	FLOW_CONTINUES, /* any other packet */
	FLOW_ENDS,	/* a FIN of the client */
	FLOW_RESETS,	/* an RST of the client */
	FLOW_REMOVED,	/* a remove-stickiness: the server confirms the end */
};

/* Whether the connection is established, as far as the balancer knows. */
static __always_inline bool is_established(enum flow_state state)
{
	return state == FLOW_ESTABLISHED || state == FLOW_SILENT;
}

/*
 * The state machine: the state of a flow after an event.
 *
 *	                  free    new          established, silent  closing      closed
 *	FLOW_OPENS        new     new          the same             closing      new
 *	FLOW_CONTINUES    new     established  established          established  established
 *	FLOW_ENDS         new     closing      closing              closing      closed
 *	FLOW_RESETS       new     new          closing              closing      closed
 *	FLOW_REMOVED      closed  closed       closed               closed       closed
 *
 * Neither a SYN nor an RST confirms a new flow: a flood can repeat SYNs, and if it has forged
 * sources, the hosts there reset what they did not open. A packet after the end may establish the
 * flow again: the connection was only half closed, the FIN or RST was forged, or the packet is of
 * the next connection. But flow_renew() ignores such a packet soon after the end (flow_ignores).
 */
static __always_inline enum flow_state flow_next(enum flow_state from, enum flow_event event)
{
	if (event == FLOW_REMOVED)
		return FLOW_CLOSED;
	if (from == FLOW_FREE)
		return FLOW_NEW;
	switch (event) {
	case FLOW_OPENS:
		return from == FLOW_CLOSED ? FLOW_NEW : from;
	case FLOW_RESETS:
		if (from == FLOW_NEW)
			return FLOW_NEW;
		__attribute__((fallthrough));
	case FLOW_ENDS:
		return from == FLOW_CLOSED ? FLOW_CLOSED : FLOW_CLOSING;
	default:
		return FLOW_ESTABLISHED;
	}
}

#endif
