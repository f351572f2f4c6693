/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The loads that servers report in their signals (net/report.h), for placements that order
 * candidates by their loads (order.h).
 *
 * A report that is replayed or overtaken changes nothing: its serial, which the signal's tag
 * covers, is not newer than that of the last report, or it is too far from the server's clock. The
 * balancer knows that clock from the server's answers to probes.
 */
#ifndef SEGUE_BALANCER_SIGNAL_REPORTS_H
#define SEGUE_BALANCER_SIGNAL_REPORTS_H

#include "balancer/decision.h"
#include "net/report.h"
#include "balancer/segments.h"
#include "balancer/tables/services.h"
#include "balancer/types.h"

/* Estimates have more precision than reported loads. */
#define ESTIMATE_SHIFT 8

static __always_inline struct report *report_at(__u32 server)
{
	return &directory()->reports[server & (MAX_SERVERS - 1)];
}

/* What all reports of a service's servers say. */
struct service_reports {
	__u64 mean; /* of the reported loads: load_value() << ESTIMATE_SHIFT; 0: no report yet */
	/* Servers that had free capacity when they last reported: SPARES slots of 16 bits, each
	 * XOR NO_SERVER so that 0 is none. The newest one is in the lowest bits. */
	__u64 spares;
};

#define SPARES 4

/* The reports of each service's servers, by the service's id. */
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

/* The results of each server's reports, by slot. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set at load: one for each slot */
	__type(key, __u32);
	__type(value, struct report_counter);
} report_counters SEC(".maps");

/* The largest difference of a serial from the server's clock, in ticks: 2.1 s. */
#define MAX_CLOCK_DIFFERENCE 512

/* A report moves the mean by this share: 1/128. The simulator has 0.01. */
#define MEAN_SHIFT 7

/* Whether a serial is near the server's clock. `offset` is the `clock` of struct report. If the
 * clock is not known, any serial is near. */
static __always_inline bool is_near_clock(__u32 offset, __u32 serial)
{
	__s32 difference = serial_difference(serial, serial_now() + offset);

	return !(offset & CLOCK_KNOWN) ||
	       (difference <= MAX_CLOCK_DIFFERENCE && difference >= -MAX_CLOCK_DIFFERENCE);
}

/* Whether the last report is from a moment that the server's clock, now at `clock`, has not
 * reached. */
static __always_inline bool is_ahead(__u32 last, __u32 clock)
{
	return last & SERIAL_KNOWN && serial_difference(last, clock) > MAX_CLOCK_DIFFERENCE;
}

/* Whether a report's serial is newer than that of the last report. */
static __always_inline bool is_newer(__u32 last, __u32 serial)
{
	return !(last & SERIAL_KNOWN) || serial_difference(serial, last) > 0;
}

static __always_inline void count_report(__u32 server, enum report_result result)
{
	struct report_counter *counter = bpf_map_lookup_elem(&report_counters, &server);

	if (counter && result < REPORT_RESULTS)
		counter->count[result]++;
}

/* Moves the mean of the service's reports towards a reported load. The mean begins at 0. So at
 * first the estimates of servers that were not heard for long are low. These servers get offers,
 * and are heard. Cores may overwrite each other's change, which matters little. */
static __always_inline void move_mean(struct service_reports *all, __s64 value)
{
	__s64 mean = *(volatile __u64 *)&all->mean;

	*(volatile __u64 *)&all->mean = mean + ((value - mean) >> MEAN_SHIFT);
}

/* The i-th server of the list of spare servers, or NO_SERVER. */
static __always_inline __u32 spare_at(__u64 spares, __u32 i)
{
	return (spares >> 16 * i & 0xffff) ^ NO_SERVER;
}

/* The list of spare servers, with one server removed. */
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

/* Puts a server in front of the list of spare servers if it has free capacity (`is_free`), or else
 * removes it from the list. */
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

/* Notes a load that a server has reported or told another server; 0: unknown. */
static __always_inline void note_load(struct service_reports *all, __u32 server,
				      struct report *report, __u8 load)
{
	__u64 value = (__u64)load_value(load) << ESTIMATE_SHIFT;

	*(volatile __u64 *)&report->heard = value << 32 | (__u32)bpf_jiffies64();
	note_spare(all, server, load && load <= LOAD_CODE_OF_ONE && takes_flows(server_at(server)));
	if (load)
		move_mean(all, value);
}

/* Notes the report of a server of the service. False: the report is refused. Its signal counts
 * nevertheless. Not inlined: see handle_in_full. */
__noinline int note_report(const struct service *service, __u32 server, __u64 report)
{
	__u32 serial = report_serial(report), last, id;
	__u8 load = report_load(report);
	struct service_reports *all;
	struct report *mine;

	if (!service || dry_run)
		return false;
	mine = report_at(server);
	id = service->id;
	all = bpf_map_lookup_elem(&service_reports, &id);
	if (!all)
		return false;
	last = *(volatile __u32 *)&mine->serial;
	if (!is_near_clock(*(volatile __u32 *)&mine->clock, serial)) {
		count_report(server, REPORT_UNSYNCHRONISED);
		return false;
	}
	/* Another core may have noted a report of the server meanwhile: a newer one, or one of the
	 * same moment. */
	if (!is_newer(last, serial) ||
	    __sync_val_compare_and_swap(&mine->serial, last, SERIAL_KNOWN | serial) != last) {
		count_report(server, REPORT_OLD);
		return false;
	}
	note_load(all, server, mine, load);
	count_report(server, load ? REPORT_TAKEN : REPORT_UNKNOWN_LOAD);
	return true;
}

/* Notes the load of the first candidate of a flow. The server that took the flow has reported this
 * load together with its own, in a new report. Not inlined: see handle_in_full. */
__noinline int note_relayed(const struct service *service, __u32 first, __u64 report)
{
	struct service_reports *all;
	__u32 id;

	if (!service || !(__u8)report)
		return 0;
	id = service->id;
	all = bpf_map_lookup_elem(&service_reports, &id);
	if (!all)
		return 0;
	note_load(all, first, report_at(first), report);
	count_report(first, REPORT_RELAYED);
	return 0;
}

#endif
