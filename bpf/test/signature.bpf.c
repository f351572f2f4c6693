/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer, but signatures have only the bits that it is told: flows are taken
 * for others so often that it can be counted.
 */
#include "net/types.h"

volatile __u64 flow_signature_mask; /* in its place in an entry */
#define FLOW_SIGNATURE_MASK flow_signature_mask

#include "balancer/balancer.bpf.c"
