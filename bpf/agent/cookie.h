/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Cookies in TCP timestamps (docs/understand/protocol.md): the balancer keeps no state of a flow.
 * This server writes its column into the low bits of each timestamp that it sends, and the client
 * returns the timestamp.
 *
 * From the end of the handshake on, the cookie is in a storage of the flow's socket: no flood can
 * evict it there. Before that, and in TIME_WAIT, it is in the flow table, because then the socket
 * has no storage. If a flood evicts the entry of a half-open connection, a repeated SYN-ACK has no
 * column (docs/operate/stateless.md, "Limits").
 */
#ifndef SEGUE_AGENT_COOKIE_H
#define SEGUE_AGENT_COOKIE_H

#include <linux/pkt_cls.h>

#include "flows.h"
#include "sent.h"
#include "net/timestamp.h"

/* A cookie as one number: the column in the lowest three bits, and the width above. 0: the flow has
 * no column. */
#define COOKIE_WIDTH_SHIFT 3
#define COOKIE_COLUMN_MASK ((1 << COOKIE_WIDTH_SHIFT) - 1)

struct socket_cookie {
	__u64 balancer; /* its locator, in memory order, as in the flow's entry */
	__u8 cookie;
	__u8 encapsulation;
	__u8 pad[6];
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_cookie);
} socket_cookies SEC(".maps");

/* Whether a balancer has ever asked for a cookie. If not, nobody looks for cookies of sockets. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} cookies_used SEC(".maps");

static __always_inline bool are_cookies_used(void)
{
	__u32 key = 0;
	const __u32 *used = bpf_map_lookup_elem(&cookies_used, &key);

	return used && *used;
}

/* The cookie for an offer that asks for one; 0: the offer has no column, or one that does not fit
 * into the cookie's width and would lead nowhere. */
static __always_inline __u8 cookie_of_sid(__u64 sid_low)
{
	__u64 argument = bpf_be64_to_cpu(sid_low);
	__u32 width = cookie_width_of_sid(sid_low);
	__u32 column = argument >> LOAD_COLUMN_SHIFT & COOKIE_COLUMN_MASK;

	if (argument & LOAD_NO_COLUMN || column > cookie_mask(width))
		return 0;
	return width << COOKIE_WIDTH_SHIFT | column;
}

/* Tells user space that a balancer has asked for a cookie. */
static __always_inline void note_cookie_use(void)
{
	__u32 key = 0, *used = bpf_map_lookup_elem(&cookies_used, &key);

	if (!dry_run && used && !*used)
		*used = 1;
}

/* Whether this host sends no timestamps (net.ipv4.tcp_timestamps, also for IPv6). */
volatile __u32 timestamps_are_off;

/*
 * Whether the cookie of an offered flow would be lost: its column is not 0, and its packets have no
 * timestamps to carry it. (Balancers seek a flow without a cookie in column 0 first.) If the column
 * is not 0, user space is told that cookies are in use. Not inlined: the verifier walks it once.
 */
__noinline int cannot_carry_column(struct xdp_md *ctx, const struct envelope *envelope,
				   const struct packet *pkt)
{
	if (!envelope || !pkt || pkt->key.protocol != IPPROTO_TCP ||
	    !(cookie_of_sid(envelope->sid_low) & COOKIE_COLUMN_MASK))
		return false;
	note_cookie_use();
	return timestamps_are_off || !find_timestamps(ctx, pkt->transport);
}

/* Enters a flow with a cookie. `is_acknowledged`: the client has acknowledged the SYN-ACK. With
 * this state, the fields `told` and `first` have other meanings (struct agent_flow). In a dry run,
 * neither of the functions that it calls changes anything. */
static __always_inline void put_cookie(const struct agent_flow_place *place,
				       const struct socket_cookie *cookie, bool is_acknowledged)
{
	struct agent_flow entry = {
		.balancer = cookie->balancer,
		.state = AGENT_FLOW_COOKIE,
		.encapsulation = cookie->encapsulation,
		.told = is_acknowledged,
		.first = cookie->cookie,
	};

	note_cookie_use();
	agent_flow_put(place, &entry);
}

/* A cookie for the flow of a packet that came in this envelope. */
static __always_inline struct socket_cookie cookie_from(const struct envelope *envelope,
							__u8 cookie)
{
	struct socket_cookie from = {
		.balancer = envelope->sender,
		.encapsulation = envelope->encapsulation,
		.cookie = cookie,
	};

	return from;
}

/* Enters a flow that this server accepts, after an offer that asks for a cookie. A repeated offer
 * without a column does not change the column. */
static __always_inline void accept_with_cookie(const struct local_flow *flow,
					       const struct envelope *envelope)
{
	struct socket_cookie cookie = cookie_from(envelope, cookie_of_sid(envelope->sid_low));

	if (!cookie.cookie && flow->entry.state == AGENT_FLOW_COOKIE && !flow->entry.told)
		cookie.cookie = flow->entry.first;
	put_cookie(&flow->place, &cookie, false);
}

/* The cookie in an entry of the flow table. */
static __always_inline struct socket_cookie cookie_in(const struct agent_flow *entry)
{
	struct socket_cookie cookie = {
		.balancer = entry->balancer,
		.encapsulation = entry->encapsulation,
		.cookie = entry->first,
	};

	return cookie;
}

/* Whether packets of a socket in this state belong to one connection. Linux before 6.13 sends the
 * packets of TIME_WAIT by a socket that many connections share, in the state CLOSE. */
static __always_inline bool is_of_connection(__u32 state)
{
	return state != BPF_TCP_CLOSE && state != BPF_TCP_LISTEN;
}

/* The cookie of a packet that this host sends: that of its socket or, if the socket has none, that
 * of the flow's entry in the flow table. 0: neither has a cookie. */
static __always_inline __u8 cookie_of_sent(struct __sk_buff *skb, const struct agent_flow *entry)
{
	struct socket_cookie remembered = cookie_in(entry);
	bool is_entered = entry->state == AGENT_FLOW_COOKIE;
	struct bpf_sock *socket = skb->sk;
	struct socket_cookie *cookie;

	if (socket)
		socket = bpf_sk_fullsock(socket);
	if (!socket)
		return is_entered ? remembered.cookie : 0;
	cookie = bpf_sk_storage_get(&socket_cookies, socket, NULL, 0);
	if (cookie)
		return cookie->cookie;
	if (!is_entered)
		return 0;
	/* Usually the socket has the cookie from the start (keep_cookie). But the program that sees
	 * new connections need not be attached. */
	if (is_of_connection(socket->state))
		bpf_sk_storage_get(&socket_cookies, socket, &remembered,
				   BPF_SK_STORAGE_GET_F_CREATE);
	return remembered.cookie;
}

#endif
