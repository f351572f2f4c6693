/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Takes the cookie out of the echo of a client's packet. The cookie has replaced the low bits of
 * the stack's timestamp, and nobody has kept those bits. So the stack gets an echo that is as good.
 */
#ifndef SEGUE_AGENT_ECHO_H
#define SEGUE_AGENT_ECHO_H

#include <bpf/bpf_core_read.h>

#include "local.h"
#include "stamp.h"

/* The timestamps of the SYN-ACKs that were sent to a half-open connection. */
struct sent_range {
	__u32 first;
	__u32 last;
};

/* Reads the timestamps of the SYN-ACKs from a request socket. False: they cannot be read. Multipath
 * TCP has requests of another type, which begin with the same structure: see read_sent_isn(). */
static __always_inline bool read_range(struct bpf_sock *socket, struct sent_range *range)
{
	struct tcp_request_sock *request = bpf_skc_to_tcp_request_sock(socket);

	if (!bpf_core_field_exists(request->snt_tsval_first))
		return false;
	if (request) {
		range->first = request->snt_tsval_first;
		range->last = request->snt_tsval_last;
		return true;
	}
	return !bpf_probe_read_kernel(&request, sizeof(request), &socket) &&
	       !bpf_probe_read_kernel(&range->first, sizeof(range->first),
				      &request->snt_tsval_first) &&
	       !bpf_probe_read_kernel(&range->last, sizeof(range->last), &request->snt_tsval_last);
}

/* Finds the timestamps that a packet of a half-open connection can echo. False if the kernel does
 * not keep them: then it accepts any echo. */
static __always_inline bool find_range(struct xdp_md *ctx, const struct packet *pkt,
				       struct sent_range *range)
{
	struct bpf_sock *socket = find_socket(ctx, &pkt->key, pkt->key.source_port);
	bool found;

	if (!socket)
		return false;
	found = socket->state == BPF_TCP_NEW_SYN_RECV && read_range(socket, range);
	bpf_sk_release(socket);
	return found;
}

/* Whether timestamp a is later than b. */
static __always_inline bool is_after(__u32 a, __u32 b)
{
	return (__s32)(a - b) > 0;
}

/*
 * The echo for the stack. In a connection it is the latest timestamp that the packet can echo. It
 * is never earlier than the true one: otherwise Linux would believe that it had repeated a packet
 * in vain, and undo what it did for the loss (RFC 3522). It is up to `mask` ticks later than the
 * true one. If it is later than the clock, Linux measures no round trip.
 *
 * For a half-open connection, Linux 6.15 and later drop an echo of a timestamp that was not sent.
 * So the echo is at most the timestamp of the last SYN-ACK, which is the true one or a later one.
 * An echo that cannot be of a SYN-ACK is not made to look like one.
 */
static __always_inline __u32 restored_echo(struct xdp_md *ctx, const struct packet *pkt, int kinds,
					   __u32 echo, __u32 mask)
{
	struct sent_range range = {};
	__u32 latest = echo | mask, earliest = echo & ~mask;

	if (kinds & SOCKET_COOKIE)
		return restored_syn_cookie(echo, mask);
	if (!(kinds & SOCKET_REQUEST) || !find_range(ctx, pkt, &range) ||
	    is_after(earliest, range.last) || is_after(range.first, latest))
		return latest;
	return is_after(latest, range.last) ? range.last : latest;
}

/* Enters the flow of a packet that completes the handshake, before the stack makes the socket. If
 * the flow has an entry with a cookie, that cookie stays. A flood may have evicted the entry: then
 * the new one gets the cookie of the packet, `echoed`. */
static __always_inline void enter_acknowledged(const struct envelope *envelope,
					       const struct packet *pkt, __u8 echoed)
{
	struct socket_cookie cookie = cookie_from(envelope, echoed);
	struct local_flow flow;

	find_agent_flow(&pkt->key, &flow);
	if (flow.entry.state == AGENT_FLOW_COOKIE) {
		if (flow.entry.told)
			return;
		cookie.cookie = flow.entry.first;
	}
	put_cookie(&flow.place, &cookie, true);
}

/* Updates the checksum for a changed value, by RFC 1624 equation 3. */
static __always_inline void replace_in_checksum(struct tcphdr *tcp, __u32 before, __u32 after)
{
	__u64 sum = (__u64)(__u16)~tcp->check + (__u32)~before + after;

	for (int i = 0; i < 3; i++) /* the sum has 34 bits, then 19, then 17 */
		sum = (sum & 0xffff) + (sum >> 16);
	tcp->check = ~sum;
}

/*
 * Handles a packet of a flow of this server whose packets carry a cookie: restores the echo in the
 * frame, and enters the flow if the packet completes the handshake. Packets without timestamps stay
 * as they are. Not inlined: the verifier walks it once.
 */
__noinline int take_cookie(struct xdp_md *ctx, const struct envelope *envelope,
			   const struct packet *pkt, int kinds)
{
	struct timestamps *timestamps;
	__u32 width, mask, echo, restored, before;
	struct tcphdr *tcp;

	if (!envelope || !pkt || pkt->kind != PACKET_WHOLE || !(pkt->tcp_flags & TCP_ACK))
		return 0;
	width = cookie_width_of_sid(envelope->sid_low);
	mask = cookie_mask(width);
	timestamps = find_timestamps(ctx, pkt->transport);
	echo = timestamps ? bpf_ntohl(timestamps->echo) : 0;
	if (kinds & (SOCKET_REQUEST | SOCKET_COOKIE))
		enter_acknowledged(envelope, pkt,
				   echo ? width << COOKIE_WIDTH_SHIFT | (echo & mask) : 0);
	if (!echo) /* 0 is no echo, as Linux understands it */
		return 0;
	restored = restored_echo(ctx, pkt, kinds, echo, mask);
	timestamps = find_timestamps(ctx, pkt->transport);
	tcp = bytes_at(ctx, pkt->transport);
	if (!timestamps || (const void *)(tcp + 1) > bytes_end(ctx))
		return 0;
	before = checksum_words(timestamps->echo, (void *)timestamps - (void *)tcp);
	timestamps->echo = bpf_htonl(restored);
	replace_in_checksum(tcp, before,
			    checksum_words(timestamps->echo, (void *)timestamps - (void *)tcp));
	return 0;
}

#endif
