/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Takes a packet through the data path up to one of its steps. The differences between the
 * measurements show the cost of each step. The verifier removes the code behind the last step.
 */
#include "balancer/tables/observe.h"
#include "balancer/persist/persistence.h"
#include "balancer/place/placement.h"
#include "balancer/path/forward.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum step {
	STEP_PARSE,
	STEP_CLASSIFY,
	STEP_LOOKUP,
	STEP_CHOOSE,
	STEP_COMMIT,
	STEP_ENCAPSULATE,
	STEP_COUNT,
};

const volatile __u32 last_step; /* enum step: set at load */

/* Makes the compiler keep the results of all steps, although nothing reads them. */
static __always_inline int stop(const void *result)
{
	asm volatile("" ::"r"(result) : "memory");
	return XDP_TX;
}

/* Takes the last steps. */
static __always_inline int leave_by(struct xdp_md *ctx, const struct packet *pkt,
				    const struct service *service, const struct segments *segments,
				    __u32 count, const struct flow *flow, enum lb_reason why)
{
	enum lb_reason failed;
	const struct port *port =
		send(ctx, pkt, service, segments, count, flow_label(flow), &failed);

	if (!port)
		return XDP_DROP;
	if (last_step == STEP_COUNT)
		count_forwarded(segments->server[0], why, pkt);
	return transmit(port);
}

/* The steps of a packet of a known flow. */
SEC("xdp")
int xdp_steps(struct xdp_md *ctx)
{
	struct segments segments = {};
	struct flow flow = {};
	struct packet pkt = {};
	struct service service;

	if (!for_host(ctx) || parse(ctx, &pkt))
		return XDP_DROP;
	if (last_step == STEP_PARSE)
		return stop(&pkt);
	if (classify(&pkt, &service))
		return XDP_DROP;
	if (last_step == STEP_CLASSIFY)
		return stop(&service);
	if (!lookup_plain(ctx, &pkt, &service, &flow, &segments))
		return stop(&flow); /* the flow is one of the few without an entry */
	if (last_step == STEP_LOOKUP)
		return stop(&segments);
	return leave_by(ctx, &pkt, &service, &segments, 1, &flow, LB_FORWARD_KNOWN);
}

/* The steps of a new flow's packet from classify on. Not inlined, as handle_in_full(). */
__noinline int place(struct xdp_md *ctx, struct packet *pkt)
{
	struct segments segments = {};
	struct service service = {};
	struct flow flow = {};
	enum lb_reason why;
	int holder = -1;

	if (!pkt || classify(pkt, &service))
		return XDP_DROP;
	if (last_step == STEP_CLASSIFY)
		return stop(&service);
	why = lookup(ctx, pkt, &service, &flow, &holder, &segments);
	if (why || last_step == STEP_LOOKUP)
		return stop(&flow);
	if (!choose(pkt, &service, holder, &segments))
		return XDP_DROP;
	if (last_step == STEP_CHOOSE)
		return stop(&segments);
	why = commit(pkt, &service, &flow, &segments);
	if (last_step == STEP_COMMIT)
		return stop(&flow);
	return leave_by(ctx, pkt, &service, &segments, (__u8)forget(segments.count), &flow,
			(__u8)forget(why));
}

/* The steps of a packet of a new flow. */
SEC("xdp")
int xdp_steps_new(struct xdp_md *ctx)
{
	struct packet pkt = {};

	if (!for_host(ctx) || parse(ctx, &pkt))
		return XDP_DROP;
	return last_step == STEP_PARSE ? stop(&pkt) : place(ctx, &pkt);
}
