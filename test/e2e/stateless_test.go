// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/generation"
	"github.com/segue-lb/segue/internal/lab"
)

// statelessServices returns services without a flow table, in each encapsulation.
func statelessServices(candidates int) []lab.Service {
	services := huntingServices(candidates)
	for i := range services {
		services[i].Persistence = desired.PersistenceStateless
	}
	hash := services[0]
	hash.Name, hash.Port, hash.Placement, hash.Candidates = "hash6", 81, desired.PlacementHash, 0
	return append(services, hash)
}

// TestStatelessTraffic sends requests, downloads and uploads to services without a flow table. Each
// server gets some, and every byte is correct.
func TestStatelessTraffic(t *testing.T) {
	t.Parallel()
	l := up(t, hunting(statelessServices(4)...))
	c := newClient(l)
	for _, s := range l.Topology.Services {
		for _, size := range lab.Sizes {
			must(t, c.download(t.Context(), s, size))
			must(t, c.upload(t.Context(), s, size))
		}
		if _, err := c.visit(t.Context(), s, 40); err != nil {
			t.Errorf("%s: %v", s.Name, err)
		}
	}
	must(t, c.spread(t.Context(), nodes(l, lab.RoleServer)...))
	requireNoDrops(t, l)
}

// TestStatelessSurvivesChanges holds 1,000 connections while servers are added and removed, one
// after another. Then a balancer that was just started gets all packets. The connections are
// at servers that stay, so none is lost.
func TestStatelessSurvivesChanges(t *testing.T) {
	topology := hunting(statelessServices(4)...)
	topology.Servers, topology.Applications = 24, []lab.Application{lab.Nginx}
	l := up(t, topology)
	all := nodes(l, lab.RoleServer)
	const stay = 13
	reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, all[:stay]...) })
	awaitServers(t, l)
	must(t, l.SetNextHops("lb1"))
	live := open(t, l, liveConnections, l.Topology.Services...)
	live.rounds(t, 1)
	for change := range 2 {
		kept := append([]string{}, all[:stay]...)
		if first := stay + change/2; change%2 == 0 {
			kept = append(kept, all[first], all[first+1])
		} else {
			kept = append(kept, all[first+1])
		}
		reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, kept...) })
	}
	live.rounds(t, 1)
	live.requireUnbroken(t)
	startAnew(t, l, "lb2", "lb1")
	must(t, l.SetNextHops("lb2"))
	live.rounds(t, 2)
	live.requireUnbroken(t)
}

// startAnew removes a balancer with all that it knows, and starts it with the generations of another.
func startAnew(t *testing.T, l *lab.Lab, name, other string) {
	t.Helper()
	lb := l.Process(name, "lb")
	must(t, lb.Stop())
	n := l.Node(name)
	command(t, l, name, segue, "lb", "detach", n.Instance())
	from := l.Node(other).BalancerConfig().Node
	to := n.BalancerConfig().Node
	text, err := os.ReadFile(generation.File(from.State, from.Instance))
	must(t, err)
	must(t, os.WriteFile(generation.File(to.State, to.Instance), text, 0o600))
	must(t, lb.Start(t.Context()))
}
