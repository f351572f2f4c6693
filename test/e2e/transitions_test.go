// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/lab"
)

// TestPersistenceChangesUnderLoad changes the persistence of services in use, from each one to
// each other. Connections from before all changes continue, and so do those that were opened
// under each persistence, with timestamps and without.
func TestPersistenceChangesUnderLoad(t *testing.T) {
	t.Parallel()
	const (
		table     = desired.PersistenceTable
		stateless = desired.PersistenceStateless
		hint      = desired.PersistenceHint
	)
	topology := hunting(columnServices(4, table)...)
	topology.Servers, topology.Applications = 6, []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	visitors := startVisitors(t, l, 2, l.Topology.Services...)
	var live []*load
	for _, next := range []desired.Persistence{stateless, hint, table, hint, stateless, table} {
		live = append(live, openMixed(t, l, 40, l.Topology.Services...))
		reconfigure(t, l, func(cfg *desired.Balancer) {
			for i := range cfg.Services {
				cfg.Services[i].Persistence = next
			}
		})
		visitors.more(t, 20)
		for _, opened := range live {
			opened.rounds(t, 1)
			opened.requireUnbroken(t)
		}
		visitors.requireContent(t)
		t.Logf("%d loads continue after the change to %s", len(live), next)
	}
	visitors.stop()
	requireNoDrops(t, l)
}
