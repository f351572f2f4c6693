/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How programs stay within the verifier's limits.
 *
 * The verifier walks every path, and gives up after a million instructions. It leaves a path where
 * the registers and the stack can hold nothing that it has not allowed there before. Three means
 * lead to such places sooner, or make bounds easy to follow:
 *
 *	- a global function (__noinline, not static) is walked once, and not once for each path to
 *	  it. The caller then knows neither its result nor what it has written through pointers
 *	  (Linux commit 51c39bb1d5d1, "bpf: Introduce function-by-function verification");
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
