/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Connection IDs of QUIC. Balancers forward a packet to the server whose ID is in the connection ID
 * (docs/operate/quic.md). If an application issues IDs with the server ID of another server,
 * balancers forward its clients' packets to that server, and count them as those of a known flow.
 * Only the agent knows which server ID is its server's own. So it counts such packets, and changes
 * neither packets nor decisions.
 */
#ifndef SEGUE_AGENT_QUIC_H
#define SEGUE_AGENT_QUIC_H

#include "maps.h"
#include "net/quic.h"
#include "sent.h"
#include "stats.h"

#define QUIC_ROTATION_SHIFT 5 /* of the rotation in the first octet of an ID */
#define QUIC_PREFIX_SIZE 16   /* the first octet, and the longest server ID */
#define QUIC_ID_SIZE 20	      /* the longest ID of the versions 1 and 2 */

/* How the connection IDs of this server begin, in the form of one config rotation. */
struct quic_own_id {
	__u8 octets[QUIC_PREFIX_SIZE]; /* the first octet, and the server ID */
	__u8 mask[QUIC_PREFIX_SIZE];   /* the bits that all IDs of this server have in common */
	__u32 length;		       /* of the whole ID, in octets; 0: IDs are not compared */
	__u32 pad;
};

/* The forms of a service's connection IDs. Their rotations differ. A service without a former form
 * has the present one twice. */
struct quic_own_ids {
	struct quic_own_id present;
	struct quic_own_id former;
};

/* The IDs of each UDP service. A service whose IDs are not compared is here, too. Otherwise its
 * packets would count for a service of all ports. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct quic_own_ids);
} quic_own_ids SEC(".maps");

/* A connection ID, or the beginning of a longer one. */
struct quic_id {
	__u8 octets[QUIC_ID_SIZE]; /* zeros behind the ID */
	__u8 length;
	__u8 pad[3];
} __attribute__((aligned(8)));

/* The packets with one result (enum quic_id_result), and the last of their IDs. A reader may find
 * that ID half written. */
struct quic_id_count {
	__u64 packets;
	__u64 when; /* ns of the coarse clock */
	struct quic_id last;
};

struct quic_id_counts {
	struct quic_id_count of[QUIC_ID_COUNT];
};

/* The counts of each service whose IDs are compared. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, MAX_AGENT_SERVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct service_key);
	__type(value, struct quic_id_counts);
} quic_id_counts SEC(".maps");

/* Counts a packet with a result, and keeps its ID. */
static __always_inline void count_quic_id(const struct service_key *key, enum quic_id_result result,
					  const struct quic_id *id)
{
	struct quic_id_counts *counts = bpf_map_lookup_elem(&quic_id_counts, key);

	if (!counts)
		return;
	counts->of[result].packets++;
	counts->of[result].when = bpf_ktime_get_coarse_ns();
	counts->of[result].last = *id;
}

/* Finds how this server's IDs begin in the service of a flow, and sets `key` to the key of the
 * service's entries: port 0 is that of a service with all ports. NULL: the service's IDs are not
 * compared. */
static __always_inline const struct quic_own_ids *find_own_ids(const struct flow_key *flow,
							       struct service_key *key)
{
	const struct quic_own_ids *ids;

	copy_address(&key->vip, &flow->destination);
	key->port = flow->destination_port;
	key->protocol = IPPROTO_UDP;
	ids = bpf_map_lookup_elem(&quic_own_ids, key);
	if (!ids) {
		if (!to_first_key(key)) {
			key->port = 0;
			to_first_key(key);
		}
		ids = bpf_map_lookup_elem(&quic_own_ids, key);
	}
	return ids && ids->present.length ? ids : NULL;
}

/* How this server's IDs begin in the former form, if a given ID has its config rotation, or else in
 * the present form. */
static __always_inline const struct quic_own_id *own_id(const struct quic_own_ids *ids,
							const struct quic_id *id)
{
	__u8 rotation = id->octets[0] >> QUIC_ROTATION_SHIFT;

	return rotation == ids->former.octets[0] >> QUIC_ROTATION_SHIFT ? &ids->former
									: &ids->present;
}

/* Whether an ID names a server, as Config.ServerID in quiclb/quiclb.go decides. */
static __always_inline bool names_server(const struct quic_id *id, const struct quic_own_id *own)
{
	return id->length >= own->length && !((id->octets[0] ^ own->octets[0]) & own->mask[0]);
}

/* Whether an ID names this server. */
static __always_inline bool is_own_id(const struct quic_id *id, const struct quic_own_id *own)
{
	const __u64 *octets = (const __u64 *)id->octets;
	const __u64 *wanted = (const __u64 *)own->octets, *mask = (const __u64 *)own->mask;

	return id->length >= own->length && !((octets[0] ^ wanted[0]) & mask[0]) &&
	       !((octets[1] ^ wanted[1]) & mask[1]);
}

/*
 * Counts whether the source ID of a packet that this host sends names this server. An application
 * on this host has issued the ID. Packets with a short header have no source ID, and that of a
 * Version Negotiation packet is the client's, so these packets are not counted. Not inlined: it has
 * a stack of its own.
 */
__noinline int check_issued_id(struct __sk_buff *skb, const struct sent *sent)
{
	struct service_key key __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	const struct quic_own_ids *own;
	struct quic_long_header header;
	struct quic_id id = {};
	__u64 last;
	__u32 at;

	if (!sent)
		return 0;
	own = find_own_ids(&sent->flow, &key);
	at = sent->transport + sizeof(struct udphdr);
	if (!own || bpf_skb_load_bytes(skb, at, &header, sizeof(header)) ||
	    !(header.first & QUIC_LONG_HEADER) ||
	    header.version == bpf_htonl(QUIC_VERSION_NEGOTIATION))
		return 0;
	at += sizeof(header) + header.id_length;
	if (bpf_skb_load_bytes(skb, at, &id.length, sizeof(id.length)))
		return 0;
	at += sizeof(id.length);
	if (at + id.length > skb->len)
		return 0;
	if (id.length > QUIC_ID_SIZE)
		id.length = QUIC_ID_SIZE;
	last = id.length - 1ULL; /* huge if the ID is empty: then nothing is read */
	barrier_var(last);
	if (last < QUIC_ID_SIZE && bpf_skb_load_bytes(skb, at, id.octets, last + 1))
		return 0;
	count_quic_id(&key,
		      is_own_id(&id, own_id(own, &id)) ? QUIC_ID_ISSUED_OWN : QUIC_ID_ISSUED_OTHER,
		      &id);
	return 0;
}

/*
 * Counts a packet that the host's stack gets if its destination ID names another server. The ID of
 * an Initial or 0-RTT packet does not count, because the client has chosen it. Nor does an ID that
 * names no server, because any datagram may seem to have one. Packets with extension headers are
 * not read, as in read_sent(). Not inlined: most packets are not of QUIC.
 */
__noinline int check_delivered_id(struct xdp_md *ctx)
{
	struct service_key key __attribute__((aligned(8))) = {}; /* addresses are copied as words */
	const struct quic_own_ids *ids;
	const struct quic_own_id *own;
	struct packet pkt = {};
	struct cursor at = {};
	struct quic_id id = {};
	__u64 last;
	bool opens;

	if (parse_network(ctx, &at, &pkt, NULL) || pkt.transport ||
	    pkt.key.protocol != IPPROTO_UDP || parse_transport(&at, &pkt, true))
		return 0;
	ids = find_own_ids(&pkt.key, &key);
	if (!ids || !enter_udp(&at) || !find_connection_id(&at, &opens) || opens)
		return 0;
	last = at.left - 1ULL; /* huge if the ID is empty: refused below */
	if (at.left > QUIC_ID_SIZE)
		last = QUIC_ID_SIZE - 1;
	barrier_var(last);
	if (last >= QUIC_ID_SIZE ||
	    bpf_xdp_load_bytes(ctx, at.pos - frame_start(ctx), id.octets, last + 1))
		return 0;
	id.length = last + 1;
	own = own_id(ids, &id);
	if (names_server(&id, own) && !is_own_id(&id, own))
		count_quic_id(&key, QUIC_ID_DELIVERED_OTHER, &id);
	return 0;
}

#endif
