/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The directory: services, servers, and the ports that lead to servers. Only user space writes
 * these, and most packets read them. The directory is the only value of one map. Programs address
 * it directly. A lookup for each part would take a tenth of the time of a known flow's packet.
 *
 * The reports of servers are in the directory, too, although packets write them: a SYN may look at
 * the reports of eight servers. They have lines of their own, so that reports do not take the lines
 * of the servers from the caches of other cores.
 */
#ifndef SEGUE_BALANCER_TABLES_DIRECTORY_H
#define SEGUE_BALANCER_TABLES_DIRECTORY_H

#include "balancer/types.h"

/* The table is a quarter full when all services have VIPs of their own. */
#define SERVICE_BITS 16
#define SERVICE_LINES (1 << SERVICE_BITS)
#define SERVICES_PER_LINE 2
#define MAX_SERVERS 65536
#define MAX_PORTS 256

struct service_line {
	struct service_entry entry[SERVICES_PER_LINE];
};

/* Mapped memory starts at a page, so each service_line is a cache line. */
struct directory {
	__u64 generation; /* of services: table generation % 2 is in force */
	__u64 pad[7];
	struct port ports[MAX_PORTS];
	struct server servers[MAX_SERVERS];
	struct service_line services[2][SERVICE_LINES];
	struct report reports[MAX_SERVERS];
};

/* The start of the directory. User space makes the section as large as struct directory when it
 * loads the programs, to keep its zeros out of the object file. */
__u64 directory_start SEC(".data.directory") __hidden;

static __always_inline struct directory *directory(void)
{
	void *start = &directory_start;

	/* The compiler believes that there is only this word. */
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
