/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Takes an offer that the server accepts through the agent's data path up to one of its steps. The
 * differences between the measurements show the cost of each step. The verifier removes the code
 * behind the last step.
 */
#include "agent/decap.h"
#include "agent/handshake.h"
#include "net/host.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum agent_step {
	AGENT_STEP_ENVELOPE,
	AGENT_STEP_VIP,
	AGENT_STEP_CLIENT,
	AGENT_STEP_LOOKUP,
	AGENT_STEP_SOCKET,
	AGENT_STEP_POLICY,
	AGENT_STEP_ENTER,
	AGENT_STEP_DELIVER,
};

const volatile __u32 last_step; /* enum agent_step: set at load */

/* Makes the compiler keep the results of all steps, although nothing reads them. */
static __always_inline int stop(const void *result)
{
	asm volatile("" ::"r"(result) : "memory");
	return XDP_PASS;
}

/* The steps that need the client's packet. */
static __always_inline int offer_steps(struct xdp_md *ctx, const struct envelope *envelope)
{
	struct client_packet client = {};
	struct backlog backlog = {};
	struct local_flow flow;
	int kinds;

	if (!is_balancer(envelope->sender) || !read_client(ctx, envelope, &client))
		return XDP_DROP;
	if (last_step == AGENT_STEP_CLIENT)
		return stop(&client);
	find_agent_flow(&client.packet.key, &flow);
	if (last_step == AGENT_STEP_LOOKUP)
		return stop(&flow);
	kinds = find_socket_kinds(ctx, &client.packet, &backlog);
	if (is_live(kinds) || was_accepted(&flow, kinds))
		return XDP_DROP;
	if (last_step == AGENT_STEP_SOCKET)
		return stop(&backlog);
	if (take_connection(ctx, envelope, &client.packet, kinds, &backlog))
		return XDP_DROP;
	if (last_step == AGENT_STEP_POLICY)
		return stop(&client);
	enter_accepted(ctx, envelope, &flow);
	if (last_step == AGENT_STEP_ENTER)
		return stop(&client);
	return deliver(ctx, envelope) < AGENT_DROP_IP_HEADER ? XDP_PASS : XDP_DROP;
}

/* Takes the steps up to the last one. */
SEC("xdp")
int xdp_agent_steps(struct xdp_md *ctx)
{
	struct envelope envelope = {};

	if (!for_host(ctx) || read_envelope(ctx, &envelope))
		return XDP_DROP;
	if (last_step == AGENT_STEP_ENVELOPE)
		return stop(&envelope);
	if (!is_served(&envelope))
		return XDP_DROP;
	if (last_step == AGENT_STEP_VIP)
		return stop(&envelope);
	return offer_steps(ctx, &envelope);
}
