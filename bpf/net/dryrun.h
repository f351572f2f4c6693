/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A dry run decides what happens to a packet, and changes nothing: `segue trace` runs it.
 */
#ifndef SEGUE_NET_DRYRUN_H
#define SEGUE_NET_DRYRUN_H

/* Set at load, only by `segue trace` and tests. */
const volatile bool dry_run;

#endif
