/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * How programs stay within the verifier's limits.
 *
 * The verifier walks every path, and gives up after a million instructions. It leaves a path at an
 * instruction that it has checked before, if the earlier check covers all values that registers and
 * stack can now have. Three means make it leave paths sooner, or make bounds easy to follow:
 *
 *	- a global function (__noinline, not static) is walked once, and not once for each path to
 *	  it. On the caller's path, the verifier then knows neither the function's result nor what
 *	  the function has written through pointers (Linux commit 51c39bb1d5d1, "bpf: Introduce
 *	  function-by-function verification");
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

/* Returns the value, hidden from the verifier: it can be any number of 64 bits. */
static __always_inline __u64 forget(__u64 value)
{
	value += hidden_zero;
	barrier_var(value);
	return value;
}

#endif
