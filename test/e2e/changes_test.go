// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestPersistenceChangesUnderLoad changes the persistence of services in use, from each one to each
// other. At each change, one server leaves or comes back. After one of them, the balancers are
// killed and start again. Connections from before all changes continue, and so do those that were
// opened under each persistence, with timestamps and without. Connections to servers that leave are
// excepted.
func TestPersistenceChangesUnderLoad(t *testing.T) {
	t.Parallel()
	const (
		table     = desired.PersistenceTable
		stateless = desired.PersistenceStateless
		hint      = desired.PersistenceHint
	)
	topology := hunting(columnServices(4, hint)...)
	topology.Servers, topology.Applications = 6, []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	visitors := startVisitors(t, l, 2, l.Topology.Services...)
	var live []*load
	present, absent := hint, ""
	for _, round := range []struct {
		next desired.Persistence
		gone string // the server that is not configured from then on
		kill bool
	}{
		// Columns have several servers before flows of hint meet stateless without former flows.
		{hint, "s5", false},
		{stateless, "", false},
		{hint, "s6", false},
		{table, "", false},
		{stateless, "s5", true}, // with former flows
		{table, "", false},
		{hint, "s6", false},
	} {
		live = append(live, openMixed(t, l, 20, l.Topology.Services...))
		if round.gone != "" {
			setPersistence(t, l, present, func(cfg *desired.Balancer) { drain(cfg, round.gone) })
			visitors.more(t, 20) // so that no request is at the server when it leaves
		}
		if absent != "" && absent != round.gone {
			// It still has sockets of connections from before it left. One of them would take the
			// packets of a newer connection from the same port (docs/operate/stateless.md, "Limits").
			command(t, l, absent, "ss", "--kill", "--tcp", "state", "connected")
		}
		present, absent = round.next, round.gone
		setPersistence(t, l, present, func(cfg *desired.Balancer) { remove(cfg, round.gone) })
		awaitServers(t, l)
		for _, name := range nodes(l, lab.RoleBalancer) {
			if round.kill {
				restart(t, l.Process(name, "lb"))
			}
		}
		visitors.more(t, 20)
		for _, opened := range live {
			opened.rounds(t, 1)
			opened.requireUnbroken(t, "s5", "s6")
		}
		visitors.requireContent(t)
		t.Logf("%d loads continue after the change to %s without %q", len(live), round.next, round.gone)
	}
	visitors.stop()
	// A server that has left signals that its old connections end.
	requireNoDropsBut(t, l, "drop_sender")
}

// setPersistence gives all services a persistence, and changes the configuration further.
func setPersistence(
	t *testing.T, l *lab.Lab, persistence desired.Persistence, change func(*desired.Balancer),
) {
	t.Helper()
	reconfigure(t, l, func(cfg *desired.Balancer) {
		for i := range cfg.Services {
			cfg.Services[i].Persistence = persistence
		}
		change(cfg)
	})
}

// remove removes a server from all services. An empty name removes none.
func remove(cfg *desired.Balancer, server string) {
	for i := range cfg.Services {
		s := &cfg.Services[i]
		s.Servers = slices.DeleteFunc(s.Servers, func(s desired.Server) bool { return s.Name == server })
	}
}
