/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Signals: servers tell the balancer that they have accepted a flow (create-stickiness), or that it
 * is ending (remove-stickiness). A signal comes with a packet to the client. The balancer takes the
 * signal off and sends the packet on. The states are those of 6LB, table II;
 * docs/understand/protocol.md lists all of them.
 */
#ifndef SEGUE_BALANCER_SIGNAL_SIGNALS_H
#define SEGUE_BALANCER_SIGNAL_SIGNALS_H

#include "balancer/path/forward.h"
#include "balancer/persist/persistence.h"
#include "balancer/place/placement.h"
#include "balancer/path/reset.h"
#include "net/tag.h"
#include "balancer/path/unwrap.h"

/* The key that leads from the sender of a signal to its slot. The service is part of it, because
 * one host may serve many services. */
struct sender {
	__u64 locator; /* in memory order */
	__u32 service;
	__u32 pad;
};

#define MAX_SENDERS 131072
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_SENDERS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sender);
	__type(value, __u32);
} senders SEC(".maps");

/* The server that sent the signal; NULL if the service has no such server. */
static __always_inline const struct server *
find_sender(const struct signal *signal, const struct service *service, __u32 *number)
{
	const struct sender key = { .locator = signal->sender, .service = service->id };
	const __u32 *slot = bpf_map_lookup_elem(&senders, &key);
	const struct server *server;

	if (!slot)
		return NULL;
	*number = *slot;
	server = server_at(*number);
	return serves(server, service) ? server : NULL;
}

/* Whether the tag of a signal is valid. Without keys, every signal is accepted. Not inlined: its
 * stack frame would be too large for the caller. */
__noinline int has_valid_tag(const struct packet *pkt, const struct signal *signal)
{
	const struct signal_keys *keys = find_signal_keys();
	struct tagged tagged_signal;
	__u64 tag;

	if (!pkt || !signal)
		return false;
	if (!keys)
		return true;
	tagged_signal = tagged(&pkt->key, signal->sender, signal->report,
			       sid_low_function(signal->sid_low));
	tag = sid_low_argument(signal->sid_low);
	return tag == make_tag(&tagged_signal, &keys->key[0]) ||
	       tag == make_tag(&tagged_signal, &keys->key[1]);
}

/* Whether the signal is remove-stickiness. */
static __always_inline bool is_removal(const struct signal *signal)
{
	return sid_low_function(signal->sid_low) == SID_REMOVE;
}

/* The load report of the signal (net/report.h); 0: none. A segment with a function is no report. */
static __always_inline __u64 report_of(const struct signal *signal)
{
	__u64 low = bpf_be64_to_cpu(signal->report);

	return low & ~SID_ARGUMENT_MASK ? 0 : low;
}

/* Notes what a signal tells about loads, and about the first candidate of the flow. Not inlined:
 * the verifier walks it once. */
__noinline int take_report(const struct packet *pkt, const struct service *service, __u32 sender,
			   __u64 report)
{
	int first = -1;

	if (!pkt || !service)
		return 0;
	if (pkt->tcp_flags & TCP_SYN)
		first = first_offered(service, &pkt->key, sender, report);
	count_answered_offer(first);
	if (report && takes_reports(service) && note_report(service, sender, report) &&
	    first >= 0 && first != sender)
		note_relayed(service, first, report);
	return 0;
}

/* Turns the frame of a signal into a reset of the flow by the client, without encapsulation. False:
 * it failed. The server accepts the reset, because it has the sequence number that the server
 * expects (RFC 9293 section 3.10.7). */
static __always_inline bool make_reset(struct xdp_md *ctx, struct packet *pkt,
				       const struct signal *signal)
{
	const struct reset reset = { .seq = signal->acknowledged };
	bool is_v4 = pkt->ethertype == bpf_htons(ETH_P_IP);

	pkt->length = reset_length(is_v4);
	pkt->hop_limit = OWN_HOP_LIMIT;
	pkt->version_class = is_v4 ? bpf_htons(0x4500) : bpf_htons(0x6000);
	pkt->tcp_flags = TCP_RST;
	return put_reset(ctx, pkt, &reset);
}

/* Resets the connection at a second server that has accepted it, too: turns the signal's frame into
 * a reset, and sends it to the signal's sender. Not inlined: it has a stack of its own. */
__noinline int send_reset(struct xdp_md *ctx, struct packet *pkt, const struct service *service,
			  const struct signal *signal, __u32 sender)
{
	struct flow flow;
	struct segments segments = {
		.count = 1,
		.server = { sender },
		.first_server = server_at(sender),
	};

	if (!pkt || !service || !signal)
		return XDP_ABORTED;
	if (!make_reset(ctx, pkt, signal))
		return leave(ctx, pkt, LB_DROP_SIGNAL);
	ask(&segments, SID_DELIVER, SID_DELIVER);
	flow_identify(&flow, &pkt->key, service->vip_id);
	return forward(ctx, pkt, service, &segments, sender, 1, flow_label(&flow),
		       LB_FORWARD_RESET);
}

/* Handles a signal: notes what it says, and sends its packet on to the client. */
static __always_inline int take_signal(struct xdp_md *ctx, struct packet *pkt)
{
	struct service service = {};
	struct signal signal = {};
	__u32 sender = 0;
	enum lb_reason why;

	if (!read_signal(ctx, pkt, &signal))
		return leave(ctx, pkt, LB_DROP_SIGNAL);
	why = classify(pkt, &service);
	/* Source prefixes are about clients. The flow may be the balancer's own, of a call. */
	if (why && why != LB_DROP_SOURCE)
		return leave(ctx, pkt, LB_DROP_SENDER);
	if (!find_sender(&signal, &service, &sender))
		return leave(ctx, pkt, LB_DROP_SENDER);
	if (!has_valid_tag(pkt, &signal))
		return leave(ctx, pkt, LB_DROP_TAG);
	if (pkt->hop_limit <= 1)
		return leave(ctx, pkt, LB_DROP_HOP_LIMIT);
	count_received_signal(sender, is_removal(&signal));
	take_report(pkt, &service, sender, report_of(&signal));
	why = take_signal_of(pkt, &service, sender, is_removal(&signal));
	if (why == LB_FORWARD_RESET)
		return send_reset(ctx, pkt, &service, &signal, sender);
	return leave(ctx, pkt, remove_signal(ctx, pkt, &signal) ? why : LB_DROP_SIGNAL);
}

/* Exchanges source and destination of a flow key. */
static __always_inline void reverse(struct flow_key *key)
{
	struct in6_addr source = key->source;
	__be16 source_port = key->source_port;

	key->source = key->destination;
	key->source_port = key->destination_port;
	key->destination = source;
	key->destination_port = source_port;
}

/* Whether a returned packet is from a server of the packet's service. */
static __always_inline bool is_from_server(struct packet *pkt, const struct signal *signal)
{
	struct service service = {};
	__u32 sender;
	bool is_known;

	reverse(&pkt->key); /* as read_signal() leaves it, the key is that of a server's packet */
	is_known = !classify(pkt, &service) && find_sender(signal, &service, &sender);
	reverse(&pkt->key);
	return is_known;
}

/*
 * Takes a client's packet out of the headers with which a server returned it. These headers are
 * those of a signal. Afterwards `pkt` is as the parser leaves it. Returns LB_NONE, or why the
 * packet is dropped.
 */
static __always_inline enum lb_reason take_returned(struct xdp_md *ctx, struct packet *pkt)
{
	struct signal signal = {};

	if (!read_signal(ctx, pkt, &signal))
		return LB_DROP_SIGNAL;
	if (!is_from_server(pkt, &signal))
		return LB_DROP_SENDER;
	if (pkt->hop_limit <= 1)
		return LB_DROP_HOP_LIMIT;
	if (!remove_signal(ctx, pkt, &signal))
		return LB_DROP_SIGNAL;
	__builtin_memset(pkt, 0, sizeof(*pkt));
	if (parse(ctx, pkt) != PARSE_OK)
		return LB_DROP_SIGNAL;
	pkt->visits_all = true;
	return LB_NONE;
}

#endif
