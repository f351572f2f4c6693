/* SPDX-License-Identifier: Apache-2.0 */
/* The sizes of the tables. A build for a smaller device gives others: p4c -DBUCKETS=16384. */

#ifndef SERVICES
#define SERVICES 1024 /* and VIPs */
#endif
#ifndef SERVERS
#define SERVERS 4096
#endif
/* The counters of servers have indexes: MAX_SERVERS in bpf/balancer/tables/directory.h. */
#ifndef SLOTS
#define SLOTS 65536
#endif
/* The rows of all services together, with the former ones of services that change. */
#ifndef BUCKETS
#define BUCKETS 131072
#endif
/* The columns of all rows. */
#ifndef COLUMNS
#define COLUMNS 524288
#endif
/* One list for each row, and the columns that have had several servers: after many changes, all. */
#ifndef HISTORIES
#define HISTORIES (BUCKETS + COLUMNS)
#endif
