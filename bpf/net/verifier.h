/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How programs stay within the verifier's limits.
 *
 * The verifier walks every path, and gives up after a million instructions. It stops walking a path
 * where it comes to a state that is no more than one that it has walked before. Three means make
 * states equal, or easy to follow:
 *
 *	- a global function (__noinline, not static) is walked once, and not once for each path to
 *	  it. The verifier knows nothing of its result and of memory that it may write (kernel
 *	  documentation, bpf/bpf_design_QA and "Function by function verification");
 *	- forget() hides a value: what follows is walked once, and not once for each value;
 *	- barrier_var() (libbpf, bpf_helpers.h) hides a value from the compiler, which otherwise
 *	  moves a bound away from the register that the verifier has to see it on, or prepares all
 *	  iterations of a loop at once.
 */
#ifndef SEGUE_NET_VERIFIER_H
#define SEGUE_NET_VERIFIER_H

#include "types.h"

/* Always 0, but neither the compiler nor the verifier knows that. */
static volatile __u64 hidden_zero;

/* Returns the value. The verifier does not know any more which one it is. */
static __always_inline __u64 forget(__u64 value)
{
	value += hidden_zero;
	barrier_var(value);
	return value;
}

#endif
