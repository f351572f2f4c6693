/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Ends the way of packets to VIPs if no server gets them. Their clients are told so, unless the
 * configuration says otherwise: by a TCP reset, or by ICMP port unreachable.
 */
#ifndef SEGUE_BALANCER_PATH_REJECT_H
#define SEGUE_BALANCER_PATH_REJECT_H

#include "balancer/path/answer.h"
#include "balancer/path/reset.h"
#include "balancer/tables/services.h"

#define MAX_REMOVED_VIPS 1024

/* Packets to removed VIPs, by VIP. User space adds the elements for a table of services before the
 * table is in force, and removes others after that. So there is room for the VIPs of two tables. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 2 * MAX_REMOVED_VIPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct in6_addr);
	__type(value, struct counter);
} removed_vips SEC(".maps");

/* Counts a packet to a removed VIP. */
static __always_inline void count_removed(const struct packet *pkt)
{
	/* Linux 6.1 takes no key from a parameter of a global function. */
	struct in6_addr vip = pkt->key.destination;
	struct counter *counter = bpf_map_lookup_elem(&removed_vips, &vip);

	if (counter && !dry_run)
		add(counter, pkt);
}

/* Fills in the reset that answers a SYN to a closed port (RFC 9293 section 3.10.7.1). A client
 * accepts the reset only if it acknowledges the whole segment. False: the TCP header is missing. */
static __always_inline bool fill_reset(struct xdp_md *ctx, const struct packet *pkt,
				       struct reset *reset)
{
	const struct tcphdr *tcp;
	struct cursor at;

	move_to(&at, ctx, pkt);
	tcp = at.pos;
	if (!has(&at, sizeof(*tcp)))
		return false;
	reset->to_client = true;
	reset->has_ack = true;
	reset->ack_seq = bpf_htonl(bpf_ntohl(tcp->seq) + 1 + at.left - tcp->doff * 4);
	return true;
}

/* Turns the frame into a reset to the client. Returns `why`, or the reason for a drop. Not inlined:
 * see answer_error. */
__noinline int answer_reset(struct xdp_md *ctx, const struct packet *pkt, __u32 why)
{
	struct ethhdr *ethernet;
	struct reset reset = {};

	if (!pkt || !fill_reset(ctx, pkt, &reset))
		return LB_DROP_TRANSPORT;
	if (!may_answer_now(why, ANSWER_RESET))
		return LB_DROP_RATE_LIMIT;
	ethernet = frame_start(ctx);
	if ((void *)(ethernet + 1) > frame_end(ctx))
		return LB_DROP_TRANSPORT;
	turn_ethernet(ethernet);
	return put_reset(ctx, pkt, &reset) ? why : LB_DROP_TRANSPORT;
}

/*
 * Whether a packet may be answered by a reset: only a SYN may. A reset must not end a connection,
 * and a packet that this balancer cannot place may belong to one. A service without a server may
 * have connections on servers that are drained or fail. A port without a service here may have one
 * at another balancer, which has learnt of the service before.
 */
static __always_inline bool may_reset(const struct packet *pkt)
{
	return starts_connection(pkt) && !contradicts_itself(pkt);
}

/* Answers a packet that no server gets, if its VIP rejects such packets. Returns `answer`, or why
 * the answer cannot be sent. Returns `otherwise` if the VIP does not reject packets, or no answer
 * is permitted. */
static __always_inline enum lb_reason reject(struct xdp_md *ctx, const struct packet *pkt,
					     enum lb_reason answer, enum lb_reason otherwise)
{
	const struct service_entry *vip = find_vip(services_generation(), &pkt->key.destination);

	if (!vip || !(vip->rule.flags & VIP_REJECTS) || !may_answer(pkt))
		return otherwise;
	if (pkt->key.protocol == IPPROTO_UDP)
		return answer_error(ctx, pkt->length, answer, 0);
	return may_reset(pkt) ? answer_reset(ctx, pkt, answer) : otherwise;
}

/* Ends the way of a packet that no server gets. Returns the final reason. Not inlined: see
 * handle_in_full. */
__noinline int end_unserved(struct xdp_md *ctx, const struct packet *pkt, __u32 why)
{
	if (!pkt)
		return why;
	switch (why) {
	case LB_DROP_NO_SERVICE:
		return reject(ctx, pkt, LB_ANSWER_NO_SERVICE, why);
	case LB_DROP_NO_SERVER:
		return reject(ctx, pkt, LB_ANSWER_NO_SERVER, why);
	case LB_DROP_REMOVED_VIP:
		count_removed(pkt);
		return why;
	default:
		return why;
	}
}

#endif
