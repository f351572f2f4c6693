/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The formats of the balancer's tables, which user space shares. Go gets structs and enums through
 * bpf2go. It repeats constants that exist only as a #define. Padding is explicit everywhere.
 */
#ifndef SEGUE_BALANCER_TYPES_H
#define SEGUE_BALANCER_TYPES_H

#include "net/types.h"

#define CACHE_LINE 64
/* The longest list of candidates a packet can be offered to. */
#define MAX_CANDIDATES 8
/* How many servers the headers name instead of MAX_SEGMENTS if the driver leaves less room. Some,
 * such as ixgbe, leave 192 bytes; six servers need up to 144 (srv6-encap with the whole list) of
 * the other 152. */
#define FEW_SEGMENTS 6
/* The most generations of its servers that a service's candidate table holds. */
#define MAX_GENERATIONS 4
/* No server has this slot. It fills rows that have fewer candidates than others. */
#define NO_SERVER 0xffff

enum placement {
	PLACEMENT_HASH,
	PLACEMENT_HUNT,	       /* the candidates of the flow's bucket decide, in turn */
	PLACEMENT_HUNT_RANDOM, /* the candidates of a random bucket decide */
	PLACEMENT_ROUND_ROBIN, /* the servers get flows in turn */
	/* As PLACEMENT_HUNT, but the candidates are ordered by the loads that they have
	 * reported. */
	PLACEMENT_HUNT_REPORTS,
	PLACEMENT_HUNT_SPARE, /* likewise, and a server with free capacity is the last one */
	PLACEMENT_INFER,      /* the server with the lowest score of all (ranking.h) */
	PLACEMENT_INFER_ROW,  /* the candidate of the flow's bucket with the lowest score */
	/* The server with the lowest score, of two, three or four random ones. */
	PLACEMENT_INFER_TWO,
	PLACEMENT_INFER_THREE,
	PLACEMENT_INFER_FOUR,
	PLACEMENT_WEIGHTED_DRAW, /* a random server, by the weights (place/weighted.h) */
	PLACEMENT_WEIGHTED_TURN, /* the next server in turn, likewise */
};

enum persistence {
	PERSISTENCE_TABLE,
	PERSISTENCE_STATELESS, /* the packets themselves tell, by cookies */
	PERSISTENCE_HINT,      /* a small table guesses, and the server checks */
	PERSISTENCE_QUIC,      /* the connection IDs of QUIC name the server */
};

/* How a service's packets are handled: one word, replaced by a single store. */
struct service_rule {
	__u32 buckets;	    /* rows of its candidate table; 0: there is no table */
	__u8 flags;	    /* enum rule_flags */
	__u8 row;	    /* ROW(candidates, generations) */
	__u8 methods;	    /* METHODS(placement, persistence) */
	__u8 encapsulation; /* enum encapsulation */
} __attribute__((aligned(8)));

/* What placement and persistence know of each other and of the service's servers. */
enum rule_flags {
	RULE_TABLE = 1 << 0,	      /* the table in force is 2 id + 1, not 2 id */
	RULE_TAKES_FLOWS = 1 << 1,    /* at least one server takes new flows */
	RULE_HALF_OPEN = 1 << 2,      /* servers answer offers, or did until lately */
	RULE_SERVERS_ANSWER = 1 << 3, /* the server that accepts a flow says so */
	RULE_ASK_IDLE = 1 << 4,	      /* an idle entry proves nothing: servers are asked */
	/* Servers have agents: a server passes a packet on if it does not have the flow. */
	RULE_SERVERS_PASS_ON = 1 << 5,
	/* Persistence finds the server of a flow by its column, so it must be in the bucket's
	 * row. */
	RULE_IN_ROW = 1 << 6,
	/* The flow table may have flows from before the service had another persistence. */
	RULE_FORMER_FLOWS = 1 << 7,
};

/* The shape of a row of a candidate table: how many candidates each generation has, and how many
 * generations there are. */
#define ROW(candidates, generations) ((candidates) | (generations) << 4)

#define METHODS(placement, persistence) ((placement) | (persistence) << 4)

enum service_entry_kind {
	ENTRY_FREE,
	ENTRY_SERVICE,
	ENTRY_VIP, /* says that the address is a VIP, and what becomes of other packets to it */
};

/* The flags of the rule of a VIP's entry. */
enum vip_flags {
	VIP_REJECTS = 1 << 0, /* clients are told that no server gets their packets */
	VIP_REMOVED = 1 << 1, /* its last service was removed: its packets are dropped */
};

/* A service or a VIP, under the key by which packets find it. Two entries fill a cache line. */
struct service_entry {
	struct in6_addr vip;
	__be16 port; /* 0: every port that no other service of the VIP names */
	__u8 protocol;
	__u8 kind; /* enum service_entry_kind */
	/* Of a service, or of a removed VIP the time of the removal, in seconds of CLOCK_BOOTTIME. */
	__u32 id;
	struct service_rule rule; /* a VIP has only flags: enum vip_flags */
};

/*
 * Candidates are packed four to a word because the kernel rounds the elements
 * of an array up to eight bytes: candidate i of
 * generation g in row r is number (r * G + g) * C + i.
 */
#define CANDIDATES_PER_WORD 4
struct candidates {
	__u16 server[CANDIDATES_PER_WORD];
};

enum server_flags {
	SERVER_IN_USE = 1 << 0,	      /* keeps its flows; without it the slot is free */
	SERVER_DRAINED = 1 << 1,      /* gets no new flow */
	SERVER_FAILING = 1 << 2,      /* gets no new flow, because it is unfit and others are not */
	SERVER_IPV4 = 1 << 3,	      /* the tunnel's outer header is IPv4 */
	SERVER_UNREACHABLE = 1 << 11, /* its next hop does not answer the kernel */
	/*
	 * Why a server is unfit. The flags are also set if the server gets new flows nevertheless.
	 * User space reads them, even if no process runs. The programs read only whether the
	 * server is merely unheard.
	 */
	SERVER_UNCHECKED = 1 << 4,    /* no health check of it has had a result, or it has none */
	SERVER_CHECKS_FAIL = 1 << 5,  /* fails them */
	SERVER_UNPROBED = 1 << 6,     /* its agent is not probed */
	SERVER_SILENT = 1 << 7,	      /* its agent does not answer probes */
	SERVER_INCOMPATIBLE = 1 << 8, /* its agent speaks another version of the protocol */
	SERVER_NOT_SERVED = 1 << 9,   /* its agent does not have the VIP */
	SERVER_UNHEARD = 1 << 10,     /* the connections offered to it first are not answered */
	SERVER_ROUTED = 1 << 12,      /* it has had a route of its own, not the default route */
	/* It was unfit, and gets a growing share of new flows. Meanwhile it is drained now and
	 * then. */
	SERVER_STARTING = 1 << 13,
	SERVER_REFUSING = 1 << 14, /* unfit: its application has stopped listening */
	/* The operator has drained it, and its flows of UDP move to servers that take new flows. Not
	 * set while it only starts slowly. */
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
	__u64 next_hop;		 /* NEXT_HOP_*; 0: not resolved */
	__u32 flags;		 /* enum server_flags */
	__u32 service;		 /* its id */
	struct in6_addr address; /* locator, or the tunnel's far end */
	struct in6_addr source;	 /* the balancer, as the server sees it */
	__u64 known_sid;	 /* SID_LOW of what is asked for known flows */
	__u32 rank;		 /* 1 plus its place in its service's ranking; 0: it has none */
	/* Bits of an IPv4 `source` that differ from flow to flow. A build that does not know them has
	 * left 0 here. */
	__be32 varied;
};

/*
 * What this balancer knows of a server's load, by slot. Packets write the numbers of flows. User
 * space writes the price, which tells how the numbers are to be read (ranking.h).
 */
struct load {
	/* Its entries of all flow tables in the state FLOW_ESTABLISHED, and in the upper half how
	 * many of its new flows had a second packet, modulo 2^32. */
	__u64 flows;
	/* How many new flows were placed on it, and how many entries of new flows were removed or
	 * given to another flow, modulo 2^32. `placed` less `lost` and less the upper half of
	 * `flows` is the number of its entries in the state FLOW_NEW. A half-open flow that moves
	 * to the flow table counts as lost. */
	__u32 placed;
	__u32 lost;
	__u32 unit;	/* what one flow adds to the delay, with PRICE_SHIFT; at least 1 */
	__u32 extra;	/* what the flows of other balancers add, likewise */
	__u16 position; /* among servers of equal scores: the lowest is taken; 12 bits */
	__u8 is_away;	/* another balancer is its home */
	__u8 is_timed;	/* user space needs the durations of its flows */
	/* So many of the next flows go to it, whatever its price: they show whether it is well
	 * again. User space sets it, and each such flow takes one. Cores that do so at the same
	 * moment may leave a number below 0, which is as 0. */
	__s32 trials;
	/* So many of its flows in the state FLOW_NEW do not count, because nobody has answered
	 * them in time. User space sets it. */
	__u32 stale;
	/* How many new flows were placed, and how many of these had a second packet, before the
	 * server got its place in a ranking. User space subtracts the numbers, because it cannot
	 * set `placed` and `flows` at one moment. */
	__u32 placed_before;
	__u32 answered_before;
	__u8 pad[20];
};

/* The flows of a server that have ended, modulo 2^32. */
#define MOST_COUNTED 32
struct ends {
	/* By how many established flows it had before. The last number stands for all above, and
	 * the first one for flows that were never established. */
	__u32 by_flows[MOST_COUNTED + 1];
	__u32 pad;
};

/* A sample of the durations of a server's flows, in microseconds: the reservoir of HLB's
 * algorithm 1, with k = 128 (section VI-E1). Durations from 71 minutes on count as that. */
#define RESERVOIR_SIZE 128
struct reservoir {
	__u32 count; /* of durations so far, modulo 2^32 */
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

/* What is hashed of a flow or of all of its key, in words of 32 bits: with a key for
 * each, and one more (net/hash.h). */
#define FLOW_WORDS 6
/* The keys of a flow's two hashes, for the place in a table and for the signature: an added key,
 * then a key for each word, where those of the signature begin two further on, and its added key.
 */
#define FLOW_KEYS (FLOW_WORDS + 4)
#define TUPLE_WORDS (sizeof(struct flow_key) / sizeof(__u32))
/* The VIP's two halves; port, protocol and kind: with an odd key for each. */
#define SERVICE_WORDS 3

/*
 * What the pinned tables mean. A build refuses those of another version: to be
 * raised with every change that the tables' sizes do not show, such as other
 * bits of a flow's entry or another hash.
 */
enum tables_version {
	TABLES_VERSION = 12,
};

/* The version, and the hash keys; all but the last live as long as the tables. */
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
	ESTIMATOR_HLB_MEAN,
	ESTIMATOR_LEAST_QUEUE,
	ESTIMATOR_SED,
	ESTIMATOR_AWCMP,
	ESTIMATOR_WEIGHTED_ROUND_ROBIN,
	ESTIMATOR_GSQ2,
};

/*
 * What user space has inferred about a server. The next process continues with the state, and
 * readers show the numbers. Those have PRICE_SHIFT; 0: not known.
 */
#define ESTIMATE_STATE 300 /* StateSize in internal/infer/state.go, and some more */
struct estimate {
	__u64 time;	/* of the estimate, in nanoseconds of CLOCK_BOOTTIME */
	__u64 told;	/* time of the server's own load; 0: there is none that counts */
	__u32 capacity; /* flows that the server serves at once */
	__u32 weight;	/* relative to the other servers: infer.Report */
	__u32 wait;	/* time that flows wait, for each second of service */
	__u32 duration; /* of flows, in seconds */
	/* By these factors it seems slower: because it is new, because it does not answer new flows as
	 * others do, and because its flows fall silent while flows of other servers end. */
	__u32 slow_start;
	__u32 no_answers;
	__u32 silent_flows;
	__u32 busy;		    /* the server's own load, in units of its load source */
	__u32 limit;		    /* the capacity that the server told with it; 0: not known */
	__u8 state[ESTIMATE_STATE]; /* as the estimator saves it, and zeros */
};
_Static_assert(sizeof(struct estimate) == 52 + ESTIMATE_STATE, "padding would not be zero");

#endif
