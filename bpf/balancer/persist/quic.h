/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Persistence `quic`: the balancer keeps nothing about flows. Servers put their server IDs into the
 * connection IDs that they issue, and clients send these (docs/operate/quic.md). So a packet names
 * its server, whatever the client's address is. Packets that name no server are placed.
 *
 * Initial and 0-RTT packets are placed even if they name a server, because clients choose their
 * first IDs. Under `hunt`, the named server is asked first whether it has taken the connection.
 */
#ifndef SEGUE_BALANCER_PERSIST_QUIC_H
#define SEGUE_BALANCER_PERSIST_QUIC_H

#include "net/quic.h"
#include "balancer/persist/stateless.h"

/* The forms of the connection IDs of each service, by the service's id. During a change, user space
 * first adds all servers of the new forms to quic_servers, and then replaces the forms. Last it
 * removes the servers of the old forms. A packet that has read the old forms before may then find
 * no server. It is placed. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERVICES);
	__type(key, __u32);
	__type(value, struct quic_forms);
} quic_forms SEC(".maps");

/* Servers by the beginning of their connection IDs, in up to two forms. During a change, the map
 * has the IDs from before and from after the change. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4 * MAX_SERVERS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct quic_prefix);
	__type(value, __u32); /* slot */
} quic_servers SEC(".maps");

/* What server_of_id() returns if the packet names no server. */
#define ID_UNKNOWN -1
#define ID_OF_CLIENT -2 /* an Initial or 0-RTT packet: the client may have chosen the ID */
/* Under `hunt`, server_of_id() adds this bit to the number of a server that an Initial or 0-RTT packet
 * names. */
#define ID_OF_BOTH (1 << 16)
_Static_assert(MAX_SERVERS <= ID_OF_BOTH, "the number of a server has more bits");

#define QUIC_ROTATION_SHIFT 5 /* of the rotation in the first octet of an ID */

_Static_assert(sizeof(struct quic_forms) == sizeof(__u64), "one load must read both forms");

/* Finds the form of an ID by the ID's first octet. False: the service has no IDs. One load copies
 * both forms, because user space may replace them meanwhile. */
static __always_inline bool read_form(const struct service *service, __u8 first,
				      struct quic_form *form)
{
	struct quic_forms forms __attribute__((aligned(8)));
	__u32 id = service->id;
	const struct quic_forms *found = bpf_map_lookup_elem(&quic_forms, &id);

	if (!found)
		return false;
	*(volatile __u64 *)&forms = *(const volatile __u64 *)found;
	*form = forms.present;
	if (first >> QUIC_ROTATION_SHIFT == forms.former.rotation)
		*form = forms.former;
	return true;
}

/*
 * The server that a packet's connection ID names. ID_OF_CLIENT: the client may have chosen the ID.
 * ID_UNKNOWN: there is no ID, or it names no server of the service. It decides as Config.ServerID
 * in quiclb/quiclb.go does. The lookup in quic_servers compares the first octet, too: its rotation,
 * and the length if the octet contains it. Not inlined: see handle_in_full.
 */
__noinline int server_of_id(struct xdp_md *ctx, const struct packet *pkt,
			    const struct service *service)
{
	struct quic_prefix prefix = {};
	struct quic_form form = {};
	const __u8 *first;
	const __u32 *slot;
	struct cursor at;
	bool opens;
	int unnamed;

	if (!pkt || !service || pkt->key.protocol != IPPROTO_UDP)
		return ID_UNKNOWN;
	move_to(&at, ctx, pkt);
	if (!enter_udp(&at) || !find_connection_id(&at, &opens))
		return ID_UNKNOWN;
	if (opens && !places_by(service, PLACEMENTS_HUNTING))
		return ID_OF_CLIENT;
	unnamed = opens ? ID_OF_CLIENT : ID_UNKNOWN;
	first = at.pos;
	if (!has(&at, sizeof(*first)) || !read_form(service, *first, &form) ||
	    at.left < form.length)
		return unnamed;
	prefix.service = service->id;
	prefix.length = form.server_id_length & (QUIC_PREFIX_SIZE - 1);
	if (bpf_xdp_load_bytes(ctx, at.pos - frame_start(ctx), prefix.octets, prefix.length + 1))
		return unnamed;
	prefix.octets[0] &= form.mask;
	slot = bpf_map_lookup_elem(&quic_servers, &prefix);
	if (!slot || !serves(server_at(*slot), service))
		return unnamed;
	return opens ? (int)*slot | ID_OF_BOTH : (int)*slot;
}

/* Finds the server of a plain packet (is_plain) by its connection ID. False: handle_in_full()
 * handles the packet. */
static __always_inline bool lookup_quic_plain(struct xdp_md *ctx, const struct packet *pkt,
					      const struct service *service, struct flow *flow,
					      struct segments *segments)
{
	int number = server_of_id(ctx, pkt, service);

	if (number < 0 || number & ID_OF_BOTH)
		return false;
	flow_assume(flow, &pkt->key, number);
	go_to(segments, number, server_at(number));
	return true;
}

/* Finds the server of a packet by its connection ID. A connection stays with its server even if the
 * server fails or is drained. The reason is none if the packet is to be placed. `holder` is as in
 * lookup(), but only an ID names it. If the flow has an entry from before a change of persistence,
 * the packet has left the entry's server, mostly because that server fails. An offer to it first
 * could be lost there, and forget_former() would keep the entry. */
static __always_inline enum lb_reason lookup_quic(struct xdp_md *ctx, struct packet *pkt,
						  const struct service *service, int *holder,
						  struct segments *segments)
{
	int number = server_of_id(ctx, pkt, service);

	pkt->opens_quic = number == ID_OF_CLIENT || (number >= 0 && number & ID_OF_BOTH);
	*holder = -1;
	if (number >= 0 && pkt->opens_quic)
		*holder = number & (ID_OF_BOTH - 1);
	if (number < 0 || pkt->opens_quic)
		return LB_NONE;
	go_to(segments, number, server_at(number));
	return LB_FORWARD_KNOWN;
}

#endif
