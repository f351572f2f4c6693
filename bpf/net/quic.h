/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * QUIC packets, as far as balancers and agents read them: the header form, the version and the
 * connection IDs. These are the same in all versions (RFC 8999 section 5). The packet types of the
 * versions 1 and 2 tell whether the client has chosen the destination connection ID.
 */
#ifndef SEGUE_NET_QUIC_H
#define SEGUE_NET_QUIC_H

#include "parse.h"

#define QUIC_LONG_HEADER 0x80 /* in the first octet */
#define QUIC_VERSION_NEGOTIATION 0
#define QUIC_VERSION_1 1
#define QUIC_VERSION_2 0x6b3343cf

struct quic_long_header {
	__u8 first;
	__be32 version;
	__u8 id_length; /* of the destination connection ID, which follows */
} __attribute__((packed));

/* Whether a packet is an Initial or a 0-RTT packet. Their types are 0 and 1 in version 1 (RFC 9000
 * section 17.2), and 1 and 2 in version 2 (RFC 9369 section 3.2). */
static __always_inline bool quic_opens(__u8 first, __u32 version)
{
	__u8 type = first >> 4 & 3;

	return (version == QUIC_VERSION_1 && type <= 1) ||
	       (version == QUIC_VERSION_2 && (type == 1 || type == 2));
}

/* Moves the cursor from the UDP header to the payload. False: the packet does not hold the whole
 * datagram, because it is a first fragment. */
static __always_inline bool enter_udp(struct cursor *at)
{
	const struct udphdr *udp = at->pos;
	__u32 length;

	if (!has(at, sizeof(*udp)))
		return false;
	length = bpf_ntohs(udp->len);
	if (length < sizeof(*udp) || length > at->left)
		return false;
	at->left = length;
	skip(at, sizeof(*udp));
	return true;
}

/*
 * Moves the cursor to the destination connection ID of the first packet in a datagram. Then `left`
 * is the length of the ID. After a short header, which does not state that length, `left` counts
 * all bytes to the end of the datagram. `opens` says whether the packet is an Initial or a 0-RTT
 * packet. False: the datagram ends too soon, or the packet negotiates the version.
 */
static __always_inline bool find_connection_id(struct cursor *at, bool *opens)
{
	const struct quic_long_header *header = at->pos;
	__u32 version;

	*opens = false;
	if (!has(at, sizeof(header->first)))
		return false;
	if (!(header->first & QUIC_LONG_HEADER)) {
		skip(at, sizeof(header->first));
		return true;
	}
	if (!has(at, sizeof(*header)))
		return false;
	skip(at, sizeof(*header));
	version = bpf_ntohl(header->version);
	if (version == QUIC_VERSION_NEGOTIATION || header->id_length > at->left)
		return false;
	at->left = header->id_length;
	*opens = quic_opens(header->first, version);
	return true;
}

#endif
