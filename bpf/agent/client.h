/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Reads the client's packet inside an envelope, as far as its flow key.
 */
#ifndef SEGUE_AGENT_CLIENT_H
#define SEGUE_AGENT_CLIENT_H

#include "envelope.h"
#include "net/dryrun.h"
#include "net/quote.h"

#define MAX_DELIVERED_FRAGMENTS 4096
#define ICMP_HEADER_SIZE 8

/* Which packet a fragment is of: RFC 791 section 3.2, RFC 8200 section 4.5. */
struct delivered_fragment {
	struct in6_addr source;
	struct in6_addr destination;
	__be32 identification;
};

/* Packets whose first fragment was delivered. Later fragments have no ports, so their flow is
 * unknown. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, MAX_DELIVERED_FRAGMENTS);
	__type(key, struct delivered_fragment);
	__type(value, __u32);
} delivered_fragments SEC(".maps");

/* A client's packet, or a fragment of one. */
struct client_packet {
	struct packet packet;
	struct fragment fragment;
};

/* The key of a fragment in delivered_fragments. */
static __always_inline struct delivered_fragment
delivered_fragment(const struct client_packet *client)
{
	struct delivered_fragment key = {
		.source = client->packet.key.source,
		.destination = client->packet.key.destination,
		.identification = client->fragment.identification,
	};

	return key;
}

/* Notes that a first fragment was delivered. Later fragments of its packet then follow it. */
static __always_inline void note_delivered_fragment(const struct client_packet *client)
{
	struct delivered_fragment key = delivered_fragment(client);
	__u32 noted = 1;

	if (dry_run)
		return;
	bpf_map_update_elem(&delivered_fragments, &key, &noted, BPF_ANY);
}

/* Whether the first fragment of a later fragment's packet was delivered. */
static __always_inline bool first_was_delivered(const struct client_packet *client)
{
	struct delivered_fragment key = delivered_fragment(client);

	return bpf_map_lookup_elem(&delivered_fragments, &key);
}

/* Reads a packet with an inserted header: the client's own IPv6 header is in front of it. */
static __always_inline bool
read_inserted_client(struct xdp_md *ctx, const struct envelope *envelope, struct packet *pkt)
{
	const struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;

	if ((void *)(ip + 1) > frame_end(ctx))
		return false;
	copy_address(&pkt->key.source, &ip->saddr);
	copy_address(&pkt->key.destination, &envelope->vip);
	pkt->ethertype = bpf_htons(ETH_P_IPV6);
	pkt->length = sizeof(*ip) + bpf_ntohs(ip->payload_len);
	set_protocol(pkt, envelope->next_header);
	pkt->transport = ETH_HLEN + envelope->size;
	return true;
}

/* Reads the client's packet inside an outer header (SRv6, GRE or IPIP). False: it is malformed. */
static __always_inline bool read_wrapped_client(struct xdp_md *ctx, const struct envelope *envelope,
						struct client_packet *client)
{
	struct packet *pkt = &client->packet;
	struct cursor at = {
		/* The mask is for the verifier. */
		.pos = frame_start(ctx) + ETH_HLEN + (envelope->size & 0x7fff),
		.end = frame_end(ctx),
	};

	if (envelope->ethertype == bpf_htons(ETH_P_IP)) {
		/* parse_ipv4() also reads fragments, because it gets a struct fragment to fill. */
		if (parse_ipv4(&at, pkt, &client->fragment))
			return false;
	} else if (parse_ipv6(&at, pkt)) {
		return false;
	}
	pkt->length += envelope->size; /* move_to() counts this length from the outer header on */
	pkt->transport = at.pos - frame_start(ctx);
	return true;
}

/* Whether a packet is ICMP of its version of IP. */
static __always_inline bool is_icmp_for(const struct packet *pkt)
{
	return pkt->key.protocol ==
	       (pkt->ethertype == bpf_htons(ETH_P_IP) ? IPPROTO_ICMP : IPPROTO_ICMPV6);
}

/*
 * Reads the client's packet up to the ports. `client` must be zero. True: it is of TCP or UDP, or
 * quotes a packet of TCP, or it is a later fragment, which has no ports. Not inlined: the verifier
 * walks it once.
 */
__noinline int read_client(struct xdp_md *ctx, const struct envelope *envelope,
			   struct client_packet *client)
{
	struct packet *pkt = &client->packet;
	struct cursor at;

	if (!envelope || !client)
		return false;
	if (envelope->encapsulation == ENCAP_SRV6_INSERT
		    ? !read_inserted_client(ctx, envelope, pkt)
		    : !read_wrapped_client(ctx, envelope, client))
		return false;
	if (pkt->ethertype == bpf_htons(ETH_P_IPV6) && is_extension(pkt->key.protocol) &&
	    parse_extensions(ctx, pkt, &client->fragment))
		return false;
	if (client->fragment.is_later)
		return true;
	move_to(&at, ctx, pkt);
	if (is_icmp_for(pkt)) {
		if (!has(&at, ICMP_HEADER_SIZE))
			return false;
		skip(&at, ICMP_HEADER_SIZE);
		if (!read_quote(ctx, &at, pkt))
			return false;
	} else if (parse_transport(&at, pkt, false)) {
		return false;
	}
	return pkt->key.protocol == IPPROTO_TCP ||
	       (pkt->key.protocol == IPPROTO_UDP && pkt->kind == PACKET_WHOLE);
}

#endif
