/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Probes: a balancer asks an agent which version of the protocol the agent speaks, whether it
 * serves a VIP, and whether the application of a service refuses connections. A probe takes the
 * path of data packets. The programs of balancer and agent share this header;
 * docs/understand/protocol.md describes the packets.
 *
 *	probe	a packet from the balancer to the VIP, with a probe_request as its data, in the
 *		service's encapsulation and with the function `probe`
 *	answer	a packet from the server to the function `probe` of the balancer
 */
#ifndef SEGUE_NET_PROBE_H
#define SEGUE_NET_PROBE_H

#include "types.h"

/* Raised when balancers and agents of two versions cannot work together. */
enum protocol_version {
	PROTOCOL_VERSION = 1,
};

/* No next header: RFC 8200 section 4.7. The kernel's headers for user space do not define it. */
#define NO_NEXT_HEADER 59

/* Agents older than the other fields read the token only. */
struct probe_request {
	__u64 token;
	/* The service's. 0: none, as in probes that have only a token. */
	__be16 port;
	__u8 protocol;
	__u8 reserved[5];
};

enum probe_flag {
	PROBE_SERVED = 1 << 0,	 /* the server takes packets to the VIP */
	PROBE_REFUSING = 1 << 1, /* the application has stopped listening, and refuses clients */
};

struct probe_answer {
	__u64 token; /* the probe's, unchanged */
	__be16 version;
	__be16 flags; /* enum probe_flag; unknown flags are ignored */
	/* The server's clock as the serial of reports (report.h), and PROBE_CLOCK_VALID. */
	__be32 clock;
};

/* Agents that make no load reports answer with a clock of 0. */
#define PROBE_CLOCK_VALID (1U << 31)

#endif
