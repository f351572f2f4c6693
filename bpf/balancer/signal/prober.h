/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer's side of probes (net/probe.h). A probe is a packet to a VIP that takes the path of
 * clients' packets: it has the same encapsulation, next hop and interface, and XDP sends it. User
 * space chooses the servers to probe, and runs xdp_probe once for each.
 */
#ifndef SEGUE_BALANCER_SIGNAL_PROBER_H
#define SEGUE_BALANCER_SIGNAL_PROBER_H

#include "balancer/decision.h"
#include "balancer/tables/directory.h"
#include "net/parse.h"
#include "net/probe.h"
#include "net/srv6.h"
#include "balancer/signal/reports.h"
#include "balancer/stats.h"
#include "balancer/path/forward.h"

/* The last probe of a server, and its answer. */
struct probe {
	struct in6_addr vip;
	__u64 token;	    /* its low 16 bits are the server's slot; 0: none was sent */
	__u64 answered;	    /* the token of the last answer */
	__u16 version;	    /* of the last answer */
	__u16 flags;	    /* of the last answer: enum probe_flag */
	__u8 encapsulation; /* enum encapsulation */
	__u8 protocol;	    /* of the service */
	__be16 port;	    /* of the service; 0: it has all ports */
};

/* The probes of servers, by slot. User space writes the fields of the probe, and the program writes
 * those of the answer. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct probe);
} probes SEC(".maps");

/* The slots to probe now. probe_turn is the index of the next one. User space writes both. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} probe_turns SEC(".maps");

__u32 probe_turn;

/* The IPv4 dummy address (RFC 7600), the source of probes to IPv4 VIPs: nothing is sent to it. */
#define DUMMY_IPV4 bpf_htonl(0xc0000008)
#define PROBE_HOP_LIMIT 64

static __always_inline struct probe_request request_of(const struct probe *probe)
{
	return (struct probe_request){
		.token = probe->token,
		.port = probe->port,
		.protocol = probe->protocol,
	};
}

/* Writes a whole probe to the frame, which may hold an earlier one, and describes it in `pkt`.
 * False: the frame is too short. */
static __always_inline bool write_probe_ipv6(struct xdp_md *ctx, const struct probe *probe,
					     const struct server *server, struct packet *pkt)
{
	struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;
	struct probe_request *request = (void *)(ip + 1);

	if ((void *)(request + 1) > frame_end(ctx))
		return false;
	pkt->ethertype = bpf_htons(ETH_P_IPV6);
	pkt->length = sizeof(*ip) + sizeof(*request);
	pkt->version_class = bpf_htons(6 << 12);
	*(__be32 *)ip = bpf_htonl(6 << 28 | (probe->token >> 16 & FLOW_LABEL_MASK));
	ip->payload_len = bpf_htons(sizeof(*request));
	ip->nexthdr = NO_NEXT_HEADER;
	ip->hop_limit = PROBE_HOP_LIMIT;
	ip->saddr = server->source;
	ip->daddr = probe->vip;
	*request = request_of(probe);
	return true;
}

/* Writes a whole probe to the frame as write_probe_ipv6 does, and shortens the frame. */
static __always_inline bool write_probe_ipv4(struct xdp_md *ctx, const struct probe *probe,
					     struct packet *pkt)
{
	struct iphdr *ip;
	struct probe_request *request;
	struct iphdr header = {
		.version = 4,
		.ihl = 5,
		.tot_len = bpf_htons(sizeof(*ip) + sizeof(*request)),
		.frag_off = bpf_htons(IP_FLAG_DF),
		.ttl = PROBE_HOP_LIMIT,
		.protocol = NO_NEXT_HEADER,
		.saddr = DUMMY_IPV4,
		.daddr = probe->vip.s6_addr32[3],
	};

	if (bpf_xdp_adjust_tail(ctx, (int)sizeof(*ip) - (int)sizeof(struct ipv6hdr)))
		return false;
	ip = frame_start(ctx) + ETH_HLEN;
	request = (void *)(ip + 1);
	if ((void *)(request + 1) > frame_end(ctx))
		return false;
	pkt->ethertype = bpf_htons(ETH_P_IP);
	pkt->length = sizeof(*ip) + sizeof(*request);
	pkt->version_class = bpf_htons(4 << 12);
	header.check = ipv4_checksum(&header);
	*ip = header;
	*request = request_of(probe);
	return true;
}

/* Sends a probe to a server. The frame is long enough for an IPv6 probe. */
static __always_inline int send_probe(struct xdp_md *ctx, __u32 server)
{
	const struct probe *probe = bpf_map_lookup_elem(&probes, &server);
	struct segments segments = {
		.count = 1,
		.server = { server },
		.first_server = server_at(server),
	};
	struct service service = {};
	struct packet pkt = {};
	const struct port *port;
	enum lb_reason failed;

	if (!probe)
		return XDP_ABORTED;
	service.rule.encapsulation = probe->encapsulation;
	pkt.key.destination = probe->vip;
	pkt.hop_limit = PROBE_HOP_LIMIT;
	if (!(is_ipv4(&probe->vip) ? write_probe_ipv4(ctx, probe, &pkt)
				   : write_probe_ipv6(ctx, probe, segments.first_server, &pkt)))
		return XDP_ABORTED;
	ask(&segments, SID_PROBE, SID_PROBE);
	port = send(ctx, &pkt, &service, &segments, 1, probe->token >> 16, &failed);
	return port ? transmit(port) : XDP_DROP;
}

/* Notes the server's clock. It forgets the server's last report in two cases, because new ones
 * would count as old: if the clock has jumped, as by a restart of the server; or if that report
 * came before the clock was known, and is ahead of it. */
static __always_inline void note_clock(__u32 server, __u32 clock)
{
	struct report *report = report_at(server);

	if (!(clock & PROBE_CLOCK_VALID))
		return;
	if (!is_near_clock(*(volatile __u32 *)&report->clock, clock) ||
	    is_ahead(*(volatile __u32 *)&report->serial, clock)) {
		*(volatile __u32 *)&report->serial = 0;
		*(volatile __u64 *)&report->heard = 0;
	}
	*(volatile __u32 *)&report->clock =
		CLOCK_KNOWN | ((clock - serial_now()) & REPORT_SERIAL_MASK);
}

/*
 * Notes a server's answer to its last probe. Strangers cannot forge an answer, because only the
 * server and the hosts on the path know the token.
 */
static __always_inline enum lb_reason take_probe_answer(struct xdp_md *ctx)
{
	const struct ipv6hdr *ip = frame_start(ctx) + ETH_HLEN;
	const struct probe_answer *answer = (const void *)(ip + 1);
	struct probe *probe;
	__u32 server;

	if ((void *)(answer + 1) > frame_end(ctx) || ip->nexthdr != NO_NEXT_HEADER ||
	    bpf_ntohs(ip->payload_len) < sizeof(*answer))
		return LB_DROP_SIGNAL;
	server = answer->token & (MAX_SERVERS - 1);
	probe = bpf_map_lookup_elem(&probes, &server);
	if (!probe || !probe->token || probe->token != answer->token)
		return LB_DROP_SENDER;
	if (dry_run)
		return LB_TAKE_PROBE;
	note_clock(server, bpf_ntohl(answer->clock));
	probe->version = bpf_ntohs(answer->version);
	probe->flags = bpf_ntohs(answer->flags);
	/* Written last: user space reads the other fields after it has seen this one. */
	*(volatile __u64 *)&probe->answered = answer->token;
	return LB_TAKE_PROBE;
}

#endif
