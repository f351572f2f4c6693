/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer's data path. A packet takes these steps:
 *
 *	parse -> classify -> lookup -> choose -> commit -> encapsulate -> transmit
 *
 * Lookup and commit belong to persistence (persistence.h), choose to placement (placement.h). If
 * lookup finds the flow, choose and commit are skipped.
 */
#include "balancer/signal/check.h"
#include "balancer/path/copies.h"
#include "balancer/decision.h"
#include "balancer/path/domain.h"
#include "balancer/path/forward.h"
#include "balancer/path/fragment.h"
#include "balancer/path/icmp.h"
#include "balancer/persist/persistence.h"
#include "balancer/place/placement.h"
#include "balancer/signal/prober.h"
#include "balancer/path/reject.h"
#include "balancer/signal/return.h"
#include "balancer/signal/signals.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* No map mentions these types. The pointer makes the compiler describe them to user space. */
const union {
	enum placement placement;
	enum bucket_hash bucket_hash;
	enum persistence persistence;
	enum encapsulation encapsulation;
	enum server_flags server_flags;
	enum flow_state flow_state;
	enum hint_use hint_use;
	enum service_entry_kind service_entry_kind;
	enum rule_flags rule_flags;
	enum feature feature;
	enum vip_flags vip_flags;
	struct service_entry service_entry;
	struct directory directory;
	struct decision decision;
	struct rank_run rank_run;
	struct held_fragment held_fragment;
	enum departure departure;
	enum lb_reason reason;
	enum report_result report_result;
	enum estimator estimator;
	enum tables_version tables_version;
	enum protocol_version protocol_version;
	enum probe_flag probe_flag;
} *shared_types __attribute__((unused));

/* Finds the servers that a packet visits. The reason tells how they were found, or why none was. */
static __always_inline enum lb_reason find_segments(struct xdp_md *ctx, struct packet *pkt,
						    const struct service *service,
						    struct flow *flow, struct segments *segments)
{
	int holder = -1;
	enum lb_reason why = lookup(ctx, pkt, service, flow, &holder, segments);

	if (why)
		return why;
	note_placed();
	if (!choose(pkt, service, holder, segments))
		return LB_DROP_NO_SERVER;
	why = commit(pkt, service, flow, segments);
	if (why == LB_FORWARD_NO_ROOM && !choose_without_room(pkt, service, segments))
		return LB_DROP_NO_SERVER;
	return why;
}

/* Finds the servers of a fragment or an ICMP error. Such a packet does not change its flow. */
static __always_inline enum lb_reason find_related(struct xdp_md *ctx, const struct packet *pkt,
						   const struct service *service, struct flow *flow,
						   struct segments *segments)
{
	if (!recall_flow(pkt, service, flow, segments)) {
		if (needs_copies(pkt, service) && may_copy_now())
			return leave_for_copies(ctx, pkt, service);
		if (!choose_related(pkt, service, segments))
			return LB_DROP_NO_SERVER;
	}
	return pkt->kind == PACKET_ICMP_ERROR ? LB_FORWARD_ICMP : LB_FORWARD_FRAGMENT;
}

/* The reason of a packet that is not parsed completely: `why` if it is for a VIP, or else it
 * passes. */
static __always_inline enum lb_reason drop_if_vip(const struct packet *pkt, enum lb_reason why)
{
	if (!pkt->ethertype) /* then the destination is not known */
		return LB_PASS_NOT_VIP;
	return reason_at(find_vip(services_generation(), &pkt->key.destination), why);
}

/* Whether a frame has a VLAN tag. */
static __always_inline bool is_in_vlan(const struct xdp_md *ctx)
{
	const struct ethhdr *ethernet = frame_start(ctx);

	return (void *)(ethernet + 1) <= frame_end(ctx) &&
	       (ethernet->h_proto == bpf_htons(ETH_P_8021Q) ||
		ethernet->h_proto == bpf_htons(ETH_P_8021AD));
}

/* Completes the flow key of a fragment or of ICMP. The reason is none if it succeeds. */
static __always_inline enum lb_reason complete_key(struct xdp_md *ctx, struct packet *pkt,
						   enum parse_result result)
{
	enum lb_reason why = reason_of(result);

	if (why == LB_PASS_NOT_IP)
		return is_in_vlan(ctx) ? LB_PASS_VLAN : LB_PASS_NOT_IP;
	why = drop_if_vip(pkt, why);
	if (why == LB_DROP_FRAGMENT)
		return read_fragment(ctx, pkt);
	if (why == LB_DROP_PROTOCOL && is_icmp(pkt))
		return read_icmp(ctx, pkt);
	return why;
}

/* Finds the service of a packet that may be unusual: a fragment, ICMP, or malformed. The reason is
 * none if the packet is to go on to the service. */
static __always_inline enum lb_reason read_unusual(struct xdp_md *ctx, struct packet *pkt,
						   enum parse_result result,
						   struct service *service)
{
	enum lb_reason why = LB_NONE;

	if (result)
		why = complete_key(ctx, pkt, result);
	if (why)
		return why;
	why = classify(pkt, service);
	if (why == LB_DROP_SOURCE)
		return why;
	if (why)
		return pkt->kind == PACKET_ICMP_ERROR ? LB_DROP_ICMP_NO_SERVICE : why;
	return contradicts_itself(pkt) ? LB_DROP_TCP_FLAGS : LB_NONE;
}

/* Handles a packet that is not plain, that is not parsed completely, or whose flow is not known.
 * `place` and `signature` are the hashes of the flow if lookup_plain() has computed them, else 0.
 * They depend on the service. If user space has changed the services since then, another service
 * may get the packet, and no later packet finds an entry that is made with these hashes. No packet
 * is lost. Not inlined: the verifier walks it once, and the path of all other packets stays
 * short. */
__noinline int handle_in_full(struct xdp_md *ctx, struct packet *pkt, __u32 result, __u64 place,
			      __u64 signature)
{
	struct segments segments = {};
	struct service service = {};
	struct flow flow = { .place = place, .signature = signature };
	enum lb_reason why;

	if (!pkt)
		return XDP_ABORTED;
	why = drop_if_intruder(pkt, read_unusual(ctx, pkt, result, &service));
	if (!why) {
		if (is_observed(&service))
			observe_packet(pkt, &service);
		why = pkt->kind == PACKET_WHOLE
			      ? find_segments(ctx, pkt, &service, &flow, &segments)
			      : find_related(ctx, pkt, &service, &flow, &segments);
	}
	if (!is_forward(why))
		return leave(ctx, pkt, end_unserved(ctx, pkt, why));
	return forward(ctx, pkt, &service, &segments, segments.server[0],
		       (__u8)forget(segments.count), flow_label(&flow), (__u8)forget(why));
}

/* What take_for_balancer() returns for a returned packet, which is handled as a client's. */
#define NO_VERDICT -1

/* Handles a packet of a server to the balancer itself. Returns the verdict, or NO_VERDICT for a
 * returned packet. Not inlined: see handle_in_full. */
__noinline int take_for_balancer(struct xdp_md *ctx, struct packet *pkt)
{
	enum lb_reason why;

	if (!pkt)
		return XDP_ABORTED;
	if (host_is_outside)
		return leave(ctx, pkt, LB_DROP_OUTSIDE);
	switch (sid_function(&pkt->key.destination)) {
	case SID_PROBE:
		return leave(ctx, pkt, take_probe_answer(ctx));
	case SID_RETURN:
		why = take_returned(ctx, pkt);
		return why ? leave(ctx, pkt, why) : NO_VERDICT;
	default:
		return take_signal(ctx, pkt);
	}
}

/* Handles a packet of a server to the balancer itself, and a returned packet as a client's. */
static __always_inline int handle_own(struct xdp_md *ctx, struct packet *pkt)
{
	int verdict = take_for_balancer(ctx, pkt);

	return verdict == NO_VERDICT ? handle_in_full(ctx, pkt, PARSE_OK, 0, 0) : verdict;
}

/* Handles a packet to this host's port of the underlay. */
static __always_inline int handle_underlaid(struct xdp_md *ctx, struct packet *pkt)
{
	enum lb_reason why = take_underlaid(ctx, pkt);

	return why ? leave(ctx, pkt, why) : handle_own(ctx, pkt);
}

/* Decides about a packet and acts on the frame. `pkt` must be zero. Returns the verdict. */
static __always_inline int process(struct xdp_md *ctx, struct packet *pkt)
{
	struct segments segments;
	struct service service;
	struct flow flow;
	enum parse_result result;
	enum lb_reason why;

	if (!from_host_to_host(ctx))
		return leave(ctx, pkt, for_host(ctx) ? LB_DROP_GROUP_SOURCE : LB_PASS_NOT_FOR_HOST);
	result = parse(ctx, pkt);
	if (dry_run && whole_length)
		pkt->length = whole_length;
	if (result && is_to_balancer(pkt, result))
		return underlay_port ? leave(ctx, pkt, LB_DROP_OUTSIDE) : handle_own(ctx, pkt);
	if (result || !is_plain(pkt))
		return handle_in_full(ctx, pkt, result, 0, 0);
	why = classify(pkt, &service);
	if (why == LB_PASS_NOT_VIP)
		return is_underlaid(pkt) ? handle_underlaid(ctx, pkt)
					 : leave(ctx, pkt, drop_if_intruder(pkt, why));
	flow.place = flow.signature = 0; /* unless lookup_plain() hashes the flow */
	if (why || !lookup_plain(ctx, pkt, &service, &flow, &segments))
		return handle_in_full(ctx, pkt, PARSE_OK, flow.place, flow.signature);
	return forward(ctx, pkt, &service, &segments, flow_server(&flow), 1, flow_label(&flow),
		       LB_FORWARD_KNOWN);
}

/* Sees the frames that the interface receives. */
SEC("xdp")
int xdp_lb(struct xdp_md *ctx)
{
	struct packet pkt = {};
	int verdict;

	if (dry_run)
		decision = (struct decision){};
	verdict = process(ctx, &pkt);
	if (dry_run && (decision.placement.is_placed || decision.rule.flags & RULE_SERVERS_ANSWER))
		note_placement(&pkt);
	return verdict;
}

/* Sends the next probe. It is not attached: user space runs it. */
SEC("xdp")
int xdp_probe(struct xdp_md *ctx)
{
	__u32 turn = __sync_fetch_and_add(&probe_turn, 1);
	const __u64 *server = bpf_map_lookup_elem(&probe_turns, &turn);

	return server ? send_probe(ctx, *server) : XDP_DROP;
}

/* Takes the packets that xdp_lb leaves for it: servers' packets to clients, and ICMP errors for all
 * servers of a service. */
SEC("tc")
int tc_return(struct __sk_buff *skb)
{
	struct copy_source source;

	if (is_marked_own(skb))
		return send_to_client(skb);
	return is_for_copies(skb, &source) ? send_copies(skb, &source) : TC_ACT_UNSPEC;
}

/* Encapsulates the packets of health checks and calls at the egress of the interface towards the
 * servers. */
SEC("tc")
int tc_check(struct __sk_buff *skb)
{
	__u32 mark = skb->mark >> 16;

	return mark == CHECK_MARK || mark == CALL_MARK ? send_check(skb) : TC_ACT_UNSPEC;
}

/* Tells user space the time of the flow table's clock, which only programs can read. */
SEC("syscall")
int read_jiffies(__u64 *jiffies)
{
	*jiffies = bpf_jiffies64();
	return 0;
}

/* Writes the present rank of a server into its service's ranking, if the server has a place there.
 * The server is in the i-th slot of the run. */
static long rank_server(__u32 i, const struct rank_run *run)
{
	__u32 slot = run->first + i;
	const struct server *server = server_at(slot);
	const struct load *load = load_at(slot);

	if (server->rank && load)
		set_rank(ranking_of(server->service), server->rank - 1,
			 present_rank(server, slot, load), true);
	return 0;
}

/* Corrects the ranks of servers, and all numbers above them in the rankings. User space runs it
 * after it has written prices, or has changed which servers take new flows. */
SEC("syscall")
int rank_servers(const struct rank_run *run)
{
	struct rank_run slots = *run;

	return bpf_loop(slots.count, rank_server, &slots, 0);
}
