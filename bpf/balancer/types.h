/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The formats of the balancer's tables, which user space shares. Go gets structs and enums through
 * bpf2go. Go repeats the constants that are only a #define. Padding is explicit everywhere.
 */
#ifndef SEGUE_BALANCER_TYPES_H
#define SEGUE_BALANCER_TYPES_H

#include "net/types.h"

#define CACHE_LINE 64
/* The most candidates to which a packet can be offered. */
#define MAX_CANDIDATES 8
/* How many servers a list has, instead of MAX_SEGMENTS, if the driver leaves too little room. Some
 * drivers, such as ixgbe, leave 192 bytes, of which the kernel keeps 40. The headers for six
 * servers need up to 144 bytes of the rest (srv6-encap with the whole list). */
#define FEW_SEGMENTS 6
/* The same with the underlay, which adds 28 bytes. */
#define FEW_UNDERLAID 4
/* The most servers of a list with the underlay: MAX_SEGMENTS has the reason. */
#define MOST_UNDERLAID 9
/* The most generations of its servers that a service's candidate table holds. */
#define MAX_GENERATIONS 4
/* No server has this slot. It fills rows that have fewer candidates than others. */
#define NO_SERVER 0xffff

enum placement {
	PLACEMENT_HASH,	       /* the first candidate of the flow's bucket that takes new flows */
	PLACEMENT_HUNT,	       /* the candidates of the flow's bucket decide, in turn */
	PLACEMENT_HUNT_RANDOM, /* the candidates of a random bucket decide */
	PLACEMENT_ROUND_ROBIN, /* the servers get flows in turn */
	/* As PLACEMENT_HUNT, but the candidates are ordered by the loads that they have
	 * reported. */
	PLACEMENT_HUNT_REPORTS,
	/* As PLACEMENT_HUNT_REPORTS, but a server with free capacity comes last. */
	PLACEMENT_HUNT_SPARE,
	PLACEMENT_INFER,     /* the server with the lowest score of all (ranking.h) */
	PLACEMENT_INFER_ROW, /* the candidate of the flow's bucket with the lowest score */
	/* The server with the lowest score, of two, three or four random ones. */
	PLACEMENT_INFER_TWO,
	PLACEMENT_INFER_THREE,
	PLACEMENT_INFER_FOUR,
	PLACEMENT_WEIGHTED_DRAW, /* a random server, by the weights (place/weighted.h) */
	PLACEMENT_WEIGHTED_TURN, /* the next server in turn, by the weights */
};

enum persistence {
	PERSISTENCE_TABLE,     /* the flow table has the server of each flow */
	PERSISTENCE_STATELESS, /* each packet names the server, by a cookie */
	PERSISTENCE_HINT,      /* a small table names a probable server, which checks the hint */
	PERSISTENCE_QUIC,      /* the connection IDs of QUIC name the server */
};

/* How a service's packets are handled: one word, replaced by a single store. */
struct service_rule {
	__u32 bucketing;    /* BUCKETING(buckets, affinity) */
	__u8 flags;	    /* enum rule_flags */
	__u8 row;	    /* ROW(candidates, generations, hash) */
	__u8 methods;	    /* METHODS(placement, persistence) */
	__u8 encapsulation; /* enum encapsulation */
} __attribute__((aligned(8)));

/*
 * How many buckets a service has, from 0 (there is no candidate table) to 2^24, and its affinity:
 * which part of a flow selects the bucket. With affinity 0, the whole flow does. Otherwise the VIP
 * and a prefix of the client's address do: affinity n leaves out the last n - 1 bits of an IPv4
 * address, or the last n - 1 digits (of four bits) of an IPv6 address. The packet's destination
 * port and protocol select the bucket, too, unless AFFINITY_SHARED is added.
 */
#define BUCKETING(buckets, affinity) ((buckets) | (affinity) << AFFINITY_SHIFT)
#define AFFINITY_SHIFT 25
#define BUCKETS_MASK ((1U << AFFINITY_SHIFT) - 1)
#define AFFINITY_PREFIX 0x3f
#define AFFINITY_SHARED 0x40

/* What placement and persistence know of each other and of the service's servers. */
enum rule_flags {
	/* The candidate table in force is number 2 * id + 1; without the flag, 2 * id. `id` is the
	 * service's. */
	RULE_TABLE = 1 << 0,
	RULE_TAKES_FLOWS = 1 << 1,    /* at least one server takes new flows */
	RULE_HALF_OPEN = 1 << 2,      /* servers answer offers, or did until lately */
	RULE_SERVERS_ANSWER = 1 << 3, /* the server that accepts a flow sends a signal */
	/* An idle entry does not prove which server has the flow: servers are asked. */
	RULE_ASK_IDLE = 1 << 4,
	/* Servers have agents: a server passes a packet on if it does not have the flow. */
	RULE_SERVERS_PASS_ON = 1 << 5,
	/* Persistence finds the server of a flow by its column, so the server must be in the row of
	 * the flow's bucket. */
	RULE_IN_ROW = 1 << 6,
	/* The flow table may have flows from before the service had another persistence. */
	RULE_FORMER_FLOWS = 1 << 7,
};

/* The hash that selects the row of a flow, which is the flow's bucket. */
enum bucket_hash {
	BUCKET_HASH_MULTILINEAR, /* it has keys (net/hash.h) */
	BUCKET_HASH_CRC32,	 /* that of switches (net/crc.h) */
};

/* A row of a candidate table: how many candidates each generation has, how many generations there
 * are, and the hash that selects the row. */
#define ROW(candidates, generations, hash) ((candidates) | (generations) << 4 | (hash) << 7)

#define METHODS(placement, persistence) ((placement) | (persistence) << 4)

enum service_entry_kind {
	ENTRY_FREE,
	ENTRY_SERVICE,
	/* Says that the address is a VIP, and what becomes of packets that no service takes. */
	ENTRY_VIP,
};

/* The flags of the rule of a VIP's entry. */
enum vip_flags {
	VIP_REJECTS = 1 << 0, /* clients are told that no server gets their packets */
	VIP_REMOVED = 1 << 1, /* its last service was removed: its packets are dropped */
};

/* A bit of service_entry.id: only clients in the service's source prefixes may reach it (sources.h). */
#define ENTRY_HAS_SOURCES (1U << 15)

/* A service or a VIP, under the key by which packets find it. Two entries fill a cache line. */
struct service_entry {
	struct in6_addr vip;
	__be16 port; /* 0: every port that no other service of the VIP names */
	__u8 protocol;
	__u8 kind; /* enum service_entry_kind */
	/* The id of a service in the lower half, with ENTRY_HAS_SOURCES, and the number of the VIP
	 * among those of the service in the upper half. A removed VIP has the time of its removal
	 * here, in seconds of CLOCK_BOOTTIME. */
	__u32 id;
	struct service_rule rule; /* a VIP has only flags: enum vip_flags */
};

/*
 * Candidates are packed four to a word, because the kernel rounds the elements of an array up to
 * eight bytes. Candidate i of generation g in row r is number (r * G + g) * C + i. G is the number
 * of generations, and C that of candidates in each.
 */
#define CANDIDATES_PER_WORD 4
struct candidates {
	__u16 server[CANDIDATES_PER_WORD];
};

enum server_flags {
	/* The slot has a server, which keeps its flows; without the flag, the slot is free. */
	SERVER_IN_USE = 1 << 0,
	SERVER_DRAINED = 1 << 1,      /* gets no new flow */
	SERVER_FAILING = 1 << 2,      /* gets no new flow, because it is unfit and others are not */
	SERVER_IPV4 = 1 << 3,	      /* the tunnel's outer header is IPv4 */
	SERVER_UNREACHABLE = 1 << 11, /* its next hop does not answer the kernel */
	/*
	 * What user space knows of the server: mostly, why it is unfit. These flags are set even if
	 * the server gets new flows nevertheless. User space reads them, even when no process of
	 * the balancer runs. The programs read only whether SERVER_UNHEARD is the only cause
	 * (is_only_unheard).
	 */
	SERVER_UNCHECKED = 1 << 4,    /* no health check of it has had a result, or it has none */
	SERVER_CHECKS_FAIL = 1 << 5,  /* its health checks fail */
	SERVER_UNPROBED = 1 << 6,     /* its agent is not probed */
	SERVER_SILENT = 1 << 7,	      /* its agent does not answer probes */
	SERVER_INCOMPATIBLE = 1 << 8, /* its agent speaks another version of the protocol */
	SERVER_NOT_SERVED = 1 << 9,   /* its agent does not have the VIP */
	/* Connections that are offered to it first are not answered. */
	SERVER_UNHEARD = 1 << 10,
	SERVER_ROUTED = 1 << 12, /* a route of its own, not the default route, has led to it */
	/* It was unfit, and gets a growing share of new flows: until it gets all of its share, it
	 * is drained for a part of the time. */
	SERVER_STARTING = 1 << 13,
	SERVER_REFUSING = 1 << 14, /* unfit: its application has stopped listening */
	/* The operator has drained it, and its flows of UDP move to servers that take new flows.
	 * Not set if it is drained only because it is starting. */
	SERVER_LEAVING = 1 << 15,
	/* Drained until one of its health checks has a result, because other servers have passed
	 * theirs. */
	SERVER_UNPROVEN = 1 << 16,
};

/*
 * A server of one service. Its number (`slot`) is what flow entries and tables contain. The struct
 * is one cache line, with everything that a packet needs to leave. Addresses never change while
 * the slot is in use. A single store replaces next_hop.
 */
struct server {
	__u64 next_hop;		 /* MAC address and port (NEXT_HOP_PORT); 0: not resolved */
	__u32 flags;		 /* enum server_flags */
	__u32 service;		 /* its id */
	struct in6_addr address; /* locator, or the tunnel's far end */
	struct in6_addr source;	 /* the balancer, as the server sees it */
	__u64 known_sid;	 /* SID_LOW of the function for packets of known flows */
	__u32 rank;		 /* 1 plus its place in its service's ranking; 0: it has none */
	/* Bits of an IPv4 `source` that differ from flow to flow. An older build has left 0
	 * here. */
	__be32 varied;
};

/* Which durations enter the sample of a server (durations.h). infer.Timing has the same numbers. */
enum timing {
	TIMING_NONE,
	TIMING_ENDS,	/* one duration of each timed flow, at its end */
	TIMING_PACKETS, /* one of each packet of a timed flow that is established (HLB) */
};

/*
 * What this balancer knows of a server's load, by slot. Packets write the numbers of flows. User
 * space writes the price, which tells how the numbers are to be read (ranking.h).
 */
struct load {
	/* Lower half: the number of its entries in the state FLOW_ESTABLISHED, in all flow tables.
	 * Upper half: how many of its new flows had a second packet, modulo 2^32. */
	__u64 flows;
	/* How many new flows were placed on it, and how many entries of new flows were removed or
	 * given to another flow, modulo 2^32. `placed` less `lost` and less the upper half of
	 * `flows` is the number of its entries in the state FLOW_NEW. A half-open flow that moves
	 * to the flow table counts as lost. */
	__u32 placed;
	__u32 lost;
	__u32 unit;	/* what one flow adds to the delay, with PRICE_SHIFT; at least 1 */
	__u32 extra;	/* what the flows of other balancers add, with PRICE_SHIFT */
	__u16 position; /* of servers with equal scores, the lowest position wins; 12 bits */
	__u8 is_away;	/* another balancer is its home (ranking.h) */
	__u8 timing;	/* enum timing: which durations of its flows are sampled */
	/* How many of the next flows go to it, whatever its price. They show whether it is well
	 * again. User space sets the number, and each such flow takes one. Cores that do so at the
	 * same moment may leave a number below 0, which counts as 0. */
	__s32 trials;
	/* How many of its flows in the state FLOW_NEW do not count, because their clients have sent
	 * no second packet in time. User space sets the number. */
	__u32 stale;
	/* How many new flows were placed, and how many of these had a second packet, before the
	 * server got its place in a ranking. User space subtracts these numbers, because it cannot
	 * clear `placed` and `flows` at one moment. */
	__u32 placed_before;
	__u32 answered_before;
	__u8 pad[20];
};

/* The flows of a server that have ended, modulo 2^32. */
#define MOST_COUNTED 32
struct ends {
	/* Element n counts the flows at whose end the server had n established flows, the ending
	 * one included. The last element counts all larger n, too. Element 0 counts the flows that
	 * were never established. */
	__u32 by_flows[MOST_COUNTED + 1];
	__u32 pad;
};

/* A sample of the durations of a server's flows, in microseconds: the reservoir of HLB's
 * algorithm 1, with k = 128 (section VI-E1). Durations from 71 minutes on count as that. */
#define RESERVOIR_SIZE 128
struct reservoir {
	/* Of durations so far, modulo 2^32. With TIMING_PACKETS: 0 before the first duration, then
	 * RESERVOIR_SIZE, because the zeros of the beginning count. */
	__u32 count;
	__u32 pad;
	__u32 duration[RESERVOIR_SIZE];
};

/* Where a service's ranking is: its leaves begin at a line of the map rank_lines. One word,
 * replaced by a single store. */
struct ranking {
	__u32 first;   /* number of a line */
	__u32 servers; /* how many places it has; 0: there is none */
};

#define RANKS_PER_LINE 8
struct rank_line {
	__u64 node[RANKS_PER_LINE];
};

#define SERIAL_KNOWN (1U << 31)
#define CLOCK_KNOWN (1U << 31)

/* What is known of a server's load and clock (reports.h). The load is decoded, because candidates
 * are ordered more often than reports arrive. */
struct report {
	/* The last load that was heard, as load_value() << ESTIMATE_SHIFT, in the upper half; 0: it
	 * is not known. The time when it was heard, in jiffies, in the lower half. */
	__u64 heard;
	/* SERIAL_KNOWN and the serial of the last report that the server has sent itself; 0:
	 * none. */
	__u32 serial;
	/* CLOCK_KNOWN and how much the server's clock is ahead of this host's, as a serial; 0: it
	 * is not known. */
	__u32 clock;
};

/* A next hop in one word: the MAC address in memory order, then the port. */
#define NEXT_HOP_PORT(next_hop) ((next_hop) >> 48)

/* An interface that packets leave by. Never changed while a next hop names it. */
struct port {
	__u32 ifindex; /* 0: not in use */
	__u16 mtu;     /* bytes of layer 3 */
	__u16 pad;
	__u64 mac; /* the MAC address, in memory order */
};

/* How many words of 32 bits the flow tables hash of a flow (FLOW_HASH_INPUT). */
#define FLOW_WORDS 6
/* The number of keys for the two hashes of a flow (multilinear_twice): its place in a table, and
 * its signature. */
#define FLOW_KEYS (FLOW_WORDS + 4)
/* The number of words of 32 bits in a flow key. A hash of them, with a key for each and one more,
 * chooses the flow's bucket in the candidate table. */
#define TUPLE_WORDS (sizeof(struct flow_key) / sizeof(__u32))
/* The number of words of 64 bits that are hashed to find a service: two of the VIP, and one of
 * port, protocol and kind. Each has an odd key. */
#define SERVICE_WORDS 3

/*
 * The version of what the pinned tables mean. A build refuses tables of another version. Raise the
 * version with every change that the tables' sizes do not show, such as other bits of a flow's
 * entry or another hash.
 */
enum tables_version {
	TABLES_VERSION = 12,
};

/* The version, and the hash keys. All but bucket_keys live as long as the tables. */
struct identity {
	__u64 version; /* enum tables_version */
	__u64 flow_keys[FLOW_KEYS];
	__u64 service_keys[SERVICE_WORDS];
	__u64 bucket_keys[TUPLE_WORDS + 1]; /* from the configured seed */
};

/* The form of a service's QUIC connection IDs: the first octet, the server ID and the nonce
 * (docs/operate/quic.md). */
struct quic_form {
	__u8 mask;	       /* bits of the first octet that all IDs have in common */
	__u8 server_id_length; /* octets, 1 to 15 */
	__u8 length;	       /* of the whole ID, in octets */
	__u8 rotation;	       /* the upper three bits of the first octet */
};

/* The forms of a service's connection IDs. Their rotations differ. A service without a former form
 * has the present one twice. */
struct quic_forms {
	struct quic_form present;
	struct quic_form former;
};

#define QUIC_PREFIX_SIZE 16

/* How the connection IDs of a server begin. */
struct quic_prefix {
	__u32 service; /* its id */
	__u32 length;  /* of the server ID, in octets */
	/* The bits of the first octet that all IDs have in common, the server ID, and zeros. */
	__u8 octets[QUIC_PREFIX_SIZE];
};

/* Names are zero-terminated. */
struct server_label {
	__u8 service[NAME_SIZE];
	__u8 server[NAME_SIZE];
};

struct service_label {
	__u8 service[NAME_SIZE];
	__u64 generation; /* number of the present one */
	__u32 digest;	  /* of the server sets in the candidate table */
	__u32 estimator;  /* enum estimator */
};

/* How user space finds the prices of a service's servers (internal/infer). */
enum estimator {
	ESTIMATOR_NONE, /* the service has no ranking */
	ESTIMATOR_TERRITORY_LEARNED,
	ESTIMATOR_TERRITORY,
	ESTIMATOR_HLB,
	ESTIMATOR_HLB_FIXED,
	ESTIMATOR_DURATIONS_MEAN,
	ESTIMATOR_LEAST_QUEUE,
	ESTIMATOR_SED,
	ESTIMATOR_AWCMP,
	ESTIMATOR_WEIGHTED_ROUND_ROBIN,
	ESTIMATOR_GSQ2,
	ESTIMATOR_DURATIONS,
	ESTIMATOR_DURATIONS_FIXED,
};

/*
 * What user space has inferred about a server. The next process continues with `state`, and readers
 * show the numbers. The numbers have PRICE_SHIFT; 0: not known.
 */
#define ESTIMATE_STATE 300 /* at least StateSize in internal/infer/state.go */
struct estimate {
	__u64 time;	/* of the estimate, in nanoseconds of CLOCK_BOOTTIME */
	__u64 told;	/* when the server told its own load; 0: it has told none that counts */
	__u32 capacity; /* flows that the server serves at once */
	__u32 weight;	/* relative to the other servers: infer.Report */
	__u32 wait;	/* seconds that flows wait, for each second of service */
	__u32 duration; /* of flows, in seconds */
	/* The factors by which the server seems slower: because it is new, because it does not
	 * answer new flows as others do, and because its flows fall silent while flows of other
	 * servers end. */
	__u32 slow_start;
	__u32 no_answers;
	__u32 silent_flows;
	__u32 busy;		    /* the server's own load, in units of its load source */
	__u32 limit;		    /* the capacity that the server told with `busy`; 0: unknown */
	__u8 state[ESTIMATE_STATE]; /* as the estimator saves it, and zeros */
};
_Static_assert(sizeof(struct estimate) == 52 + ESTIMATE_STATE, "padding would not be zero");

#endif
