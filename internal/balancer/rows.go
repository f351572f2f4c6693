// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/generation"
	"github.com/segue-lb/segue/internal/tables"
)

// buildRows builds the candidate table of the sets, the present one first. The argument slots
// contains the slots of the configured servers, by name. Candidates that are no longer configured
// have no slot, and dataplane.NoServer stands for them. buildRows returns an error if a set is not
// valid.
func buildRows(sets []generation.Set, slots map[string]uint16) (*dataplane.Rows, error) {
	built := make([]*tables.Table, len(sets))
	candidates := 0
	for i, set := range sets {
		var err error
		if built[i], err = set.Table(); err != nil {
			return nil, err
		}
		candidates = max(candidates, built[i].Candidates)
	}
	rows := dataplane.NewRows(sets[0].Buckets, len(sets), candidates)
	for i, table := range built {
		slotOf := make([]uint16, len(table.Servers))
		for j, server := range table.Servers {
			slot, ok := slots[server.Name]
			if !ok {
				slot = dataplane.NoServer
			}
			slotOf[j] = slot
		}
		if table.Candidates == 0 {
			continue
		}
		for bucket := range table.Buckets {
			to := rows.Candidates(bucket, i)
			for place, server := range table.Row(bucket) {
				to[place] = slotOf[server]
			}
		}
	}
	return rows, nil
}
