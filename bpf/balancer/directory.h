/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What user space alone writes and most packets read: services, servers, and the ports
 * that lead to them. All of it is the one value of one map, which programs address
 * directly: a lookup each would be a tenth of a known flow's packet.
 */
#ifndef SEGUE_BALANCER_DIRECTORY_H
#define SEGUE_BALANCER_DIRECTORY_H

#include "types.h"

/* A quarter full when all services have VIPs of their own. */
#define SERVICE_BITS 16
#define SERVICE_LINES (1 << SERVICE_BITS)
#define SERVICES_PER_LINE 2
#define MAX_SERVERS 65536
#define MAX_PORTS 256

struct service_line {
	struct service_entry entry[SERVICES_PER_LINE];
};

/* Mapped memory starts on a page, so that a line here is a cache line. */
struct directory {
	__u64 generation; /* of services: table generation % 2 is in force */
	__u64 pad[7];
	struct port ports[MAX_PORTS];
	struct server servers[MAX_SERVERS];
	struct service_line services[2][SERVICE_LINES];
};

/* Where it begins. User space makes it as large as struct directory when it loads the
 * programs: its zeros are not to be in the object file. */
__u64 directory_start SEC(".data.directory") __hidden;

static __always_inline struct directory *directory(void)
{
	void *start = &directory_start;

	/* The compiler knows of no more than the first word. */
	barrier_var(start);
	return start;
}

static __always_inline struct server *server_at(__u32 number)
{
	return &directory()->servers[number & (MAX_SERVERS - 1)];
}

static __always_inline const struct port *port_at(__u32 number)
{
	return &directory()->ports[number & (MAX_PORTS - 1)];
}

#endif
