/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A balancer of the usual design, to compare the flow table with. It has the same steps and
 * tables, but keeps the flows in an LRU hash map of the kernel.
 */
#include "balancer/path/forward.h"
#include "balancer/place/hash.h"
#include "net/hash.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1); /* set at load */
	__type(key, struct flow_key);
	__type(value, __u32); /* number of the server */
} reference_flows SEC(".maps");

/* Finds the server of a known flow. Places an unknown flow and stores its server. */
static __always_inline enum lb_reason
find_segments(const struct packet *pkt, const struct service *service, struct segments *segments)
{
	const __u32 *known = bpf_map_lookup_elem(&reference_flows, &pkt->key);
	__u32 placed;

	if (known) {
		segments->count = 1;
		segments->first_sid = SID_LOW(SID_DELIVER);
		segments->server[0] = *known;
		segments->first_server = server_at(*known);
		return LB_FORWARD_KNOWN;
	}
	if (!place_hash_new(&pkt->key, service, segments))
		return LB_DROP_NO_SERVER;
	placed = segments->server[0];
	if (bpf_map_update_elem(&reference_flows, &pkt->key, &placed, BPF_ANY))
		return LB_FORWARD_NO_ROOM;
	return LB_FORWARD_NEW;
}

/* Takes a packet through all steps, as xdp_lb does for plain packets. */
SEC("xdp")
int xdp_reference(struct xdp_md *ctx)
{
	struct segments segments = {};
	struct packet pkt = {};
	struct service service;
	enum lb_reason why;

	if (!for_host(ctx))
		return leave(ctx, &pkt, LB_PASS_NOT_FOR_HOST);
	if (parse(ctx, &pkt))
		return leave(ctx, &pkt, LB_PASS_NOT_IP);
	why = classify(&pkt, &service);
	if (why)
		return leave(ctx, &pkt, why);
	why = find_segments(&pkt, &service, &segments);
	return forward(ctx, &pkt, &service, &segments, segments.server[0], 1,
		       multilinear((const __u32 *)&pkt.key, TUPLE_WORDS, bucket_keys,
				   bucket_keys[TUPLE_WORDS]) >>
			       32,
		       why);
}
