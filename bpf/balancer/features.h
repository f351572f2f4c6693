/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a program can do: the placements and persistences of the services, and what else depends on
 * them. User space sets the features at load, and the verifier drops the code of all others. If the
 * services come to need more, user space loads a program with more features, and replaces the
 * attached one before it changes their rules (internal/balancer/dataplane/features.go).
 */
#ifndef SEGUE_BALANCER_FEATURES_H
#define SEGUE_BALANCER_FEATURES_H

#include "balancer/types.h"

/* The bits of the mask. The lowest bits are the placements, by enum placement. */
enum feature {
	FEATURE_PERSISTENCES = 16, /* the lowest bit of the persistences, by enum persistence */
	FEATURE_HINTS = 20,	   /* there is a hint table, and a service uses it */
	FEATURE_CRC = 21,	   /* a service selects buckets by BUCKET_HASH_CRC32 */
	FEATURE_PACKET_TIMES = 22, /* a service has TIMING_PACKETS */
	FEATURE_SOURCES = 23,	   /* a service has source prefixes */
	FEATURE_AFFINITY = 24,	   /* a service selects buckets by a part of the flow */
	FEATURE_COUNT,
};

#define PLACEMENT_BIT(placement) (1U << (placement))
#define PERSISTENCE_BIT(persistence) (1U << (FEATURE_PERSISTENCES + (persistence)))
#define FEATURE_BIT(feature) (1U << (feature))

/* The candidates of a bucket decide in turn: the balancer does not know which one will accept. */
#define PLACEMENTS_HUNTING                                                      \
	(PLACEMENT_BIT(PLACEMENT_HUNT) | PLACEMENT_BIT(PLACEMENT_HUNT_RANDOM) | \
	 PLACEMENTS_BY_REPORTS)
/* The loads that servers report order the candidates. */
#define PLACEMENTS_BY_REPORTS \
	(PLACEMENT_BIT(PLACEMENT_HUNT_REPORTS) | PLACEMENT_BIT(PLACEMENT_HUNT_SPARE))
/* The balancer picks the best of a few random servers. */
#define PLACEMENTS_SAMPLING                                                          \
	(PLACEMENT_BIT(PLACEMENT_INFER_TWO) | PLACEMENT_BIT(PLACEMENT_INFER_THREE) | \
	 PLACEMENT_BIT(PLACEMENT_INFER_FOUR))
/* The balancer picks a server by weights. */
#define PLACEMENTS_WEIGHTED \
	(PLACEMENT_BIT(PLACEMENT_WEIGHTED_DRAW) | PLACEMENT_BIT(PLACEMENT_WEIGHTED_TURN))
/* The service has a ranking of its servers. */
#define PLACEMENTS_RANKING                                                     \
	(PLACEMENT_BIT(PLACEMENT_INFER) | PLACEMENT_BIT(PLACEMENT_INFER_ROW) | \
	 PLACEMENTS_SAMPLING | PLACEMENTS_WEIGHTED)
/* The balancer picks the server of a new flow, and the flow's bucket does not tell the server. */
#define PLACEMENTS_PICKING (PLACEMENTS_RANKING | PLACEMENT_BIT(PLACEMENT_ROUND_ROBIN))

/* Packets find the server of a flow by its column in the row of the flow's bucket. */
#define PERSISTENCES_BY_COLUMN \
	(PERSISTENCE_BIT(PERSISTENCE_STATELESS) | PERSISTENCE_BIT(PERSISTENCE_HINT))
/* The flow table does not name the server of a flow, except after a change of persistence. */
#define PERSISTENCES_WITHOUT_TABLE (PERSISTENCES_BY_COLUMN | PERSISTENCE_BIT(PERSISTENCE_QUIC))

#define FEATURES_ALL (FEATURE_BIT(FEATURE_COUNT) - 1)

const volatile __u32 features = FEATURES_ALL;

/* Whether the program has at least one of these features. */
static __always_inline bool has_features(__u32 bits)
{
	return features & bits;
}

#endif
