/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The balancer with shorter signatures. The test sets the bits that they have. With few bits,
 * flows are mistaken for others so often that a test can count them.
 */
#include "net/types.h"

volatile __u64 flow_signature_mask; /* the bits, in their position in an entry */
#define FLOW_SIGNATURE_MASK flow_signature_mask

#include "balancer/balancer.bpf.c"
