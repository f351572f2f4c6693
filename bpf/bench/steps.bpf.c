/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Takes a packet of a known flow through the data path up to one of its steps. The differences
 * between the measurements show the cost of each step. The verifier removes the code behind the
 * last step.
 */
#include "balancer/tables/observe.h"
#include "balancer/persist/persistence.h"
#include "balancer/path/forward.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum step {
	STEP_PARSE,
	STEP_CLASSIFY,
	STEP_LOOKUP,
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

SEC("xdp")
int xdp_steps(struct xdp_md *ctx)
{
	const struct port *port;
	struct segments segments = {};
	struct flow flow = {};
	struct packet pkt = {};
	struct service service;
	enum lb_reason failed;

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
	port = send(ctx, &pkt, &service, &segments, 1, flow_label(&flow), &failed);
	if (!port)
		return XDP_DROP;
	if (last_step == STEP_COUNT)
		count_forwarded(flow_server(&flow), LB_FORWARD_KNOWN, &pkt);
	return transmit(port);
}
