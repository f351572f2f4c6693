/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The loads that servers report in their signals (net/report.h), for placements that order
 * candidates by them (order.h).
 *
 * A report that is replayed or overtaken changes nothing: its serial, which the signal's tag covers,
 * is not newer than that of the last report, or it is too far from the server's clock. The balancer
 * knows that clock from the server's answers to probes.
 */
#ifndef SEGUE_BALANCER_REPORTS_H
#define SEGUE_BALANCER_REPORTS_H

#include "decision.h"
#include "net/report.h"
#include "segments.h"
#include "services.h"
#include "types.h"

/*
 * The last report of a server, in one word, so that it is replaced as a whole. 0: none.
 *
 *	serial	27 bits	of the last report that the server has sent itself
 *	load	8	the code
 *	own	1	the server has sent a report itself, so the serial is valid
 *	heard	28	the time when the load was heard, in jiffies
 */
#define HEARD_BITS 28
#define HEARD_MASK ((1U << HEARD_BITS) - 1)
#define HEARD_OWN (1ULL << HEARD_BITS)
#define HEARD_LOAD_SHIFT (HEARD_BITS + 1)
#define HEARD_SERIAL_SHIFT (HEARD_LOAD_SHIFT + 8)
#define HEARD_OWN_MASK (~0ULL << HEARD_BITS & ~(0xffULL << HEARD_LOAD_SHIFT))

/* The server's clock: how much it is ahead of this host's, as a serial. */
#define CLOCK_KNOWN (1ULL << 32)

struct report {
	__u64 last;  /* HEARD_* */
	__u64 clock; /* CLOCK_KNOWN and the difference; 0: not known */
};

/* By slot. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set at load: as servers */
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct report);
} reports SEC(".maps");

/* What all reports of a service's servers say. */
struct service_reports {
	__u64 mean; /* of the reported loads: load_value() << ESTIMATE_SHIFT; 0: no report yet */
	/* Servers that had free capacity when they last reported: SPARES slots of 16 bits, each
	 * XOR NO_SERVER so that 0 is none. The newest one is in the lowest bits. */
	__u64 spares;
};

#define ESTIMATE_SHIFT 8
#define SPARES 4

/* By the service's id. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERVICES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct service_reports);
} service_reports SEC(".maps");

/* What became of a report: the `result` label of segue_lb_server_reports_total. */
enum report_result {
	REPORT_TAKEN,
	REPORT_UNKNOWN_LOAD,   /* taken: the server does not know its load */
	REPORT_OLD,	       /* not newer than the last one */
	REPORT_UNSYNCHRONISED, /* too far from the server's clock */
	REPORT_RELAYED,	       /* taken: another server told the load */

	REPORT_RESULTS,
};

struct report_counter {
	__u64 count[REPORT_RESULTS];
};

/* By slot. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set at load: as servers */
	__type(key, __u32);
	__type(value, struct report_counter);
} report_counters SEC(".maps");

/* The largest difference of a serial from the server's clock, in ticks: 2.1 s. */
#define MAX_CLOCK_DIFFERENCE 512

/* A report moves the mean by this share: 1/128. The simulator has 0.01. */
#define MEAN_SHIFT 7

static __always_inline bool is_near_clock(__u64 clock, __u32 serial)
{
	__s32 difference = serial_difference(serial, serial_now() + (__u32)clock);

	return !(clock & CLOCK_KNOWN) ||
	       (difference <= MAX_CLOCK_DIFFERENCE && difference >= -MAX_CLOCK_DIFFERENCE);
}

static __always_inline bool is_newer(__u64 last, __u32 serial)
{
	return !(last & HEARD_OWN) || serial_difference(serial, last >> HEARD_SERIAL_SHIFT) > 0;
}

static __always_inline void count_report(__u32 server, enum report_result result)
{
	struct report_counter *counter = bpf_map_lookup_elem(&report_counters, &server);

	if (counter && result < REPORT_RESULTS)
		counter->count[result]++;
}

/* Moves the mean of the service's reports. Cores may overwrite each other's change, which matters
 * little. */
static __always_inline void move_mean(struct service_reports *all, __u8 code)
{
	__s64 mean = *(volatile __u64 *)&all->mean;
	__s64 value = (__s64)load_value(code) << ESTIMATE_SHIFT;

	*(volatile __u64 *)&all->mean = mean + ((value - mean) >> MEAN_SHIFT);
}

static __always_inline __u32 spare_at(__u64 spares, __u32 i)
{
	return (spares >> 16 * i & 0xffff) ^ NO_SERVER;
}

/* The list of spare servers without a server. */
static __always_inline __u64 without_spare(__u64 spares, __u32 server)
{
	__u64 kept = 0;
	__u32 shift = 0;

#pragma clang loop unroll(full)
	for (__u32 i = 0; i < SPARES; i++) {
		if (spare_at(spares, i) == server)
			continue;
		kept |= (spares >> 16 * i & 0xffff) << shift;
		shift += 16;
	}
	return kept;
}

/* Puts a server in front of the list of spare servers, or removes it. */
static __always_inline void note_spare(struct service_reports *all, __u32 server, bool is_free)
{
	__u64 before = *(volatile __u64 *)&all->spares;
	__u64 now = without_spare(before, server);

	if (is_free)
		now = now << 16 | (server ^ NO_SERVER);
	/* If another core changes the list at this moment, the next report repeats the change. */
	if (now != before)
		__sync_val_compare_and_swap(&all->spares, before, now);
}

/* Replaces the last report of a server. `own` is the part of the new one about the server's own
 * reports. False if another core has replaced it meanwhile. */
static __always_inline bool replace_report(struct service_reports *all, __u32 server,
					   struct report *report, __u64 last, __u64 own, __u8 load)
{
	__u64 heard = own | (__u64)load << HEARD_LOAD_SHIFT | (bpf_jiffies64() & HEARD_MASK);

	if (__sync_val_compare_and_swap(&report->last, last, heard) != last)
		return false;
	note_spare(all, server, load && load <= LOAD_CODE_OF_ONE && takes_flows(server_at(server)));
	if (load)
		move_mean(all, load);
	return true;
}

/* Notes the report of a server of the service. A refused report does not drop its signal. False if
 * it is refused. Not inlined: see handle_in_full. */
__noinline int note_report(const struct service *service, __u32 server, __u64 report)
{
	__u32 serial = report_serial(report), id;
	__u8 load = report_load(report);
	struct service_reports *all;
	struct report *mine;
	__u64 last, own;

	if (!service || dry_run)
		return false;
	mine = bpf_map_lookup_elem(&reports, &server);
	id = service->id;
	all = bpf_map_lookup_elem(&service_reports, &id);
	if (!mine || !all)
		return false;
	last = *(volatile __u64 *)&mine->last;
	if (!is_near_clock(*(volatile __u64 *)&mine->clock, serial)) {
		count_report(server, REPORT_UNSYNCHRONISED);
		return false;
	}
	own = (__u64)serial << HEARD_SERIAL_SHIFT | HEARD_OWN;
	/* Another core may have noted a report of the server meanwhile: a newer one, or one of the
	 * same moment. */
	if (!is_newer(last, serial) || !replace_report(all, server, mine, last, own, load)) {
		count_report(server, REPORT_OLD);
		return false;
	}
	count_report(server, load ? REPORT_TAKEN : REPORT_UNKNOWN_LOAD);
	return true;
}

/* Notes the load that the first candidate of a flow told, by the report of the server that took the
 * flow. The report must be a new one. Not inlined: see handle_in_full. */
__noinline int note_relayed(const struct service *service, __u32 first, __u64 report)
{
	struct service_reports *all;
	struct report *its;
	__u64 last;
	__u32 id;

	if (!service || !(__u8)report)
		return 0;
	its = bpf_map_lookup_elem(&reports, &first);
	id = service->id;
	all = bpf_map_lookup_elem(&service_reports, &id);
	if (!its || !all)
		return 0;
	last = *(volatile __u64 *)&its->last;
	if (replace_report(all, first, its, last, last & HEARD_OWN_MASK, report))
		count_report(first, REPORT_RELAYED);
	return 0;
}

#endif
