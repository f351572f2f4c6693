/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Encapsulates each packet for the first servers of the table. The test sets the number of servers,
 * which can be larger than the balancer's, and the form of the list.
 */
#include "balancer/path/encap.h"
#include "balancer/tables/maps.h"
#include "net/parse.h"
#include "balancer/segments.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define FLOW_LABEL 0x12345

volatile __u32 segment_count;
volatile __u32 encapsulation;
volatile __u32 columns;
volatile bool keeps_whole;

SEC("xdp")
int xdp_segments(struct xdp_md *ctx)
{
	const struct port port = { .mac = 0x010100000002 };
	struct segments segments = {
		.count = segment_count,
		.columns = columns,
		.keeps_whole = keeps_whole,
	};
	enum encapsulation kind = encapsulation;
	struct packet pkt = {};
	struct encap encap = {
		.pkt = &pkt,
		.segments = &segments,
		.server = server_at(0),
		.flow_label = FLOW_LABEL,
	};

	if (parse(ctx, &pkt))
		return XDP_ABORTED;
	for (int i = 0; i < MAX_SEGMENTS; i++)
		segments.server[i] = i;
	segments.first_server = encap.server;
	ask(&segments, SID_CONNECT_AVAIL, SID_CONNECT_FORCE);
	encap.count = segments.count;
	encap.size = encap_size(kind, &encap);
	if (!encapsulate(ctx, kind, &encap) ||
	    !write_ethernet(&encap, encap.server->next_hop, &port, bpf_htons(ETH_P_IPV6)))
		return XDP_DROP;
	return XDP_TX;
}
