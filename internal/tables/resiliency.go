// SPDX-License-Identifier: Apache-2.0

package tables

import (
	"fmt"
	"slices"
)

// FailureRate returns the share of flows, 0 to 1, that a change of servers breaks, by section
// III-B1 of 6LB. Each candidate of a bucket has an equal share of the bucket's flows. Each entry
// of the old table whose server is also in the new table stands for flows that could survive. It
// is a failure if the server is not in the new row of the bucket, at any position. Entries of
// removed servers do not count. Servers are identified by their names.
//
// Tables with different numbers of buckets are an error.
func FailureRate(before, after *Table) (float64, error) {
	if before.Buckets != after.Buckets {
		return 0, fmt.Errorf("failure rate from %d to %d buckets: they must be equal",
			before.Buckets, after.Buckets)
	}
	const gone = -1
	byName := make(map[string]int, len(after.Servers))
	for i, s := range after.Servers {
		if s.Weight > 0 {
			byName[s.Name] = i
		}
	}
	moved := make([]int, len(before.Servers)) // maps an index in before to the index in after
	for i, s := range before.Servers {
		moved[i] = gone
		if j, ok := byName[s.Name]; ok {
			moved[i] = j
		}
	}

	failures, flows := 0, 0
	for b := range before.Buckets {
		for _, server := range before.Row(b) {
			now := moved[server]
			if now == gone {
				continue
			}
			flows++
			if !slices.Contains(after.Row(b), uint16(now)) {
				failures++
			}
		}
	}
	if flows == 0 {
		return 0, nil
	}
	return float64(failures) / float64(flows), nil
}
