/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Classify: which service a packet is for. The services are in a hash table of cache lines with two
 * entries each. An entry whose line is full is in the next line with room. So nearly every search
 * ends in the line where it began, even if it finds nothing.
 *
 * User space changes a service's rule in place, by one store. For every other change it builds a
 * new table beside the one in force, and swaps it in.
 */
#ifndef SEGUE_BALANCER_TABLES_SERVICES_H
#define SEGUE_BALANCER_TABLES_SERVICES_H

#include "balancer/tables/directory.h"
#include "balancer/tables/sources.h"
#include "balancer/features.h"
#include "net/hash.h"
#include "net/parse.h"
#include "balancer/stats.h"

#define MAX_SERVICES 16384
/* How far an entry may be from its own line, in lines. */
#define SERVICE_REACH 16

const volatile __u64 service_keys[SERVICE_WORDS];

/* A copy of a service for the time of one packet. */
struct service {
	struct service_rule rule;
	__u32 id;
	/* Stands for the service, the VIP and the protocol in the hashes of flows: `id` of the
	 * service's entry, without ENTRY_HAS_SOURCES. */
	__u32 vip_id;
};

/* How many rows the service's candidate table has: one for each bucket. 0: there is no table. */
static __always_inline __u32 buckets_of(const struct service *service)
{
	return service->rule.bucketing & BUCKETS_MASK;
}

/* Which part of a flow selects its bucket: the affinity of BUCKETING. */
static __always_inline __u32 affinity_of(const struct service *service)
{
	if (!has_features(FEATURE_BIT(FEATURE_AFFINITY)))
		return 0;
	return service->rule.bucketing >> AFFINITY_SHIFT;
}

static __always_inline enum placement placement_of(const struct service *service)
{
	return service->rule.methods & 0xf;
}

/* Whether the service's placement is one of these. The program then has the feature. */
static __always_inline bool places_by(const struct service *service, __u32 placements)
{
	return has_features(placements) && PLACEMENT_BIT(placement_of(service)) & placements;
}

static __always_inline enum persistence persistence_of(const struct service *service)
{
	return service->rule.methods >> 4;
}

/* Whether the service has this persistence. The program then has the feature. */
static __always_inline bool persists_by(const struct service *service, enum persistence persistence)
{
	return has_features(PERSISTENCE_BIT(persistence)) && persistence_of(service) == persistence;
}

/* Whether servers decide which of them gets a flow: the balancer offers it to several servers in
 * turn. If a server may already have the flow of a SYN, the balancer asks it before the others. */
static __always_inline bool servers_decide(const struct service *service)
{
	return places_by(service, PLACEMENTS_HUNTING);
}

/* Whether the flow table may have flows from before the service had another persistence. The
 * program then has the features of both. */
static __always_inline bool has_former_flows(const struct service *service)
{
	return has_features(PERSISTENCE_BIT(PERSISTENCE_TABLE)) &&
	       has_features(PERSISTENCES_WITHOUT_TABLE) && service->rule.flags & RULE_FORMER_FLOWS;
}

/* Whether new flows get only servers in the row of their bucket, because persistence would not find
 * others. The program then has such a persistence. */
static __always_inline bool stays_in_row(const struct service *service)
{
	return has_features(PERSISTENCES_BY_COLUMN) && service->rule.flags & RULE_IN_ROW;
}

/* Whether servers answer offers of the service, or did until lately. */
static __always_inline bool has_half_open(const struct service *service)
{
	return has_features(PLACEMENTS_HUNTING) && service->rule.flags & RULE_HALF_OPEN;
}

/* The number of an entry's own line. A simple hash will do, because no client chooses the
 * entries. */
static __always_inline __u32 service_place(const struct in6_addr *vip, __u32 port)
{
	const __u64 *words = (const __u64 *)vip;
	__u64 sum =
		words[0] * service_keys[0] + words[1] * service_keys[1] + port * service_keys[2];

	return spread(sum) >> (64 - SERVICE_BITS);
}

/* Port, protocol and kind of an entry as one word, as they are in memory. */
static __always_inline __u32 service_port(__be16 port, __u8 protocol, enum service_entry_kind kind)
{
	return port | (__u32)protocol << 16 | (__u32)kind << 24;
}

/* Whether an entry has this key. `port` is from service_port(). */
static __always_inline bool is_entry(const struct service_entry *entry, const struct in6_addr *vip,
				     __u32 port)
{
	const __u64 *a = (const __u64 *)&entry->vip, *b = (const __u64 *)vip;

	return *(const __u32 *)&entry->port == port && a[0] == b[0] && a[1] == b[1];
}

/*
 * Continues a search behind the entry's own line, in the table of the generation. Returns the
 * entry's number in the table, or a negative number. Not inlined: nearly every search ends in the
 * entry's own line, and the verifier walks the loop once.
 */
__noinline int search_behind(const struct in6_addr *vip, __u32 port, __u32 generation, __u32 number)
{
	const struct service_line *table = directory()->services[generation & 1];

	if (!vip)
		return -1;
	for (int i = 1; i < SERVICE_REACH; i++) {
		const struct service_line *line;

		number = (number + 1) & (SERVICE_LINES - 1);
		line = &table[number];
		if (is_entry(&line->entry[0], vip, port))
			return SERVICES_PER_LINE * number;
		if (is_entry(&line->entry[1], vip, port))
			return SERVICES_PER_LINE * number + 1;
		if (line->entry[1].kind == ENTRY_FREE)
			return -1;
	}
	return -1;
}

/* Finds the entry with a key in the table of a generation; NULL: there is none. */
static __always_inline const struct service_entry *
find_entry(__u32 generation, const struct in6_addr *vip, __u32 port)
{
	const struct service_line *table = directory()->services[generation & 1];
	__u32 number = service_place(vip, port);
	const struct service_line *line = &table[number];
	int found;

	if (is_entry(&line->entry[0], vip, port))
		return &line->entry[0];
	if (is_entry(&line->entry[1], vip, port))
		return &line->entry[1];
	if (line->entry[1].kind == ENTRY_FREE)
		return NULL;
	found = search_behind(vip, port, generation, number);
	if (found < 0)
		return NULL;
	line = &table[found / SERVICES_PER_LINE & (SERVICE_LINES - 1)];
	return &line->entry[found % SERVICES_PER_LINE];
}

/* The generation in force. A packet must use one table throughout, because user space may swap
 * tables meanwhile. */
static __always_inline __u32 services_generation(void)
{
	return *(const volatile __u64 *)&directory()->generation;
}

/* Finds the entry of a VIP; NULL: the address is not a VIP. */
static __always_inline const struct service_entry *find_vip(__u32 generation,
							    const struct in6_addr *address)
{
	return find_entry(generation, address, service_port(0, 0, ENTRY_VIP));
}

/* The reason of a packet to this VIP: `why`, or LB_DROP_REMOVED_VIP if the VIP was removed not long
 * ago. If `vip` is NULL, the packet is to no VIP, and passes. */
static __always_inline enum lb_reason reason_at(const struct service_entry *vip, enum lb_reason why)
{
	if (!vip)
		return LB_PASS_NOT_VIP;
	return vip->rule.flags & VIP_REMOVED ? LB_DROP_REMOVED_VIP : why;
}

static __always_inline void note_service(const struct service *service, bool is_exact)
{
	if (!dry_run)
		return;
	decision.rule = service->rule;
	decision.service = service->id;
	decision.has_service = true;
	decision.is_exact = is_exact;
}

/*
 * Finds the packet's service by its port, or else the VIP's service for all ports. The reason is
 * none if there is a service, and if the client may reach it. A packet to no VIP takes at most two
 * searches, and a packet of a service for all ports takes three.
 */
static __always_inline enum lb_reason classify(const struct packet *pkt, struct service *service)
{
	const struct flow_key *key = &pkt->key;
	const struct service_entry *entry;
	__u32 generation = services_generation();
	enum lb_reason why;

	entry = find_entry(generation, &key->destination,
			   service_port(key->destination_port, key->protocol, ENTRY_SERVICE));
	if (!entry) {
		why = reason_at(find_vip(generation, &key->destination), LB_NONE);
		if (why)
			return why;
		entry = find_entry(generation, &key->destination,
				   service_port(0, key->protocol, ENTRY_SERVICE));
	}
	if (!entry)
		return LB_DROP_NO_SERVICE;
	/* Volatile, so that the compiler copies the rule as one word. */
	*(volatile __u64 *)&service->rule = *(const volatile __u64 *)&entry->rule;
	service->vip_id = entry->id;
	service->id = entry->id & (MAX_SERVICES - 1);
	note_service(service, entry->port);
	if (!has_features(FEATURE_BIT(FEATURE_SOURCES)) || !(entry->id & ENTRY_HAS_SOURCES))
		return LB_NONE;
	service->vip_id &= ~ENTRY_HAS_SOURCES;
	return may_reach(key, service->id) ? LB_NONE : LB_DROP_SOURCE;
}

#endif
