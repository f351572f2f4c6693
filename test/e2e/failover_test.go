// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

var failoverFigure = flag.Bool("failover.figure", false,
	"have 48 servers, and also remove 1, 2, 4 and 8 of them, as figure 11d of 6LB")

// failoverConnections is the number of connections to each service. Some of a thousand need former
// generations.
const failoverConnections = 1000

// TestServersAndABalancerFailAtOnce removes some of many servers, at once or in three changes. Then
// the edge router sends every connection to the other balancer, which knows none. 6LB's figure 11d
// counts the connections that are reset, in addition to those of the removed servers, because their
// server is no longer in the row of their bucket: up to 2% with two candidates, and 4% with a
// single choice. Segue resets none, because packets also visit the candidates of former
// generations. A service without agents shows that some connections need it.
func TestServersAndABalancerFailAtOnce(t *testing.T) {
	servers, removals := 24, [][]int{{2, 5, 8}}
	if *failoverFigure {
		servers, removals = 48, [][]int{{1}, {2}, {4}, {8}, {2, 5, 8}}
	}
	t.Parallel()
	hunts := huntingServices(2)[0]
	hunts.Accept = desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(1 + failoverConnections/servers))}
	reports := reportingServices(desired.SelectReports)[0]
	reports.Port = 83
	hashes := lab.Service{Name: "hash", VIP: hunts.VIP, Port: 81, Protocol: desired.TCP, Encapsulation: hunts.Encapsulation}
	single := hashes
	single.Name, single.Port = "single", 82
	topology := hunting(hunts, hashes, single, reports)
	topology.Servers, topology.Applications = servers, []lab.Application{lab.Nginx}
	l := up(t, topology)
	all := nodes(l, lab.RoleServer)
	settings := func(cfg *desired.Balancer) {
		for i := range cfg.Services {
			cfg.Services[i].Generations = 4 // room for three changes
			cfg.Services[i].Probe = new(cfg.Services[i].Name != single.Name)
		}
	}
	reconfigure(t, l, settings)
	lostAlone := 0
	for _, changes := range removals {
		awaitServers(t, l) // the balancers must have the complete table before the change
		must(t, l.SetNextHops("lb1"))
		live := make([]*connection, len(l.Topology.Services)*failoverConnections)
		each(t, live, func(i int) (err error) {
			live[i], err = dial(t.Context(), l, l.Topology.Services[i%len(l.Topology.Services)])
			return err
		})
		removed := 0
		for _, removed = range changes {
			reconfigure(t, l, func(cfg *desired.Balancer) {
				settings(cfg)
				keepServers(cfg, all[removed:]...)
			})
		}
		must(t, l.SetNextHops("lb2"))
		each(t, live, func(i int) error {
			c := live[i]
			var server string
			if server, c.err = c.request(); c.err == nil && server != c.server {
				c.err = fmt.Errorf("answered by %s all of a sudden", server)
			}
			return c.conn.Close()
		})
		for _, s := range l.Topology.Services {
			expected, others := losses(live, s, all[:removed])
			t.Logf("%v of %d servers removed: %s loses %d of %d connections with them, and %d others",
				changes, servers, s.Name, expected, failoverConnections, len(others))
			if s.Name == single.Name {
				lostAlone += len(others)
			} else if len(others) > 0 {
				t.Errorf("%v of %d servers removed: %d connections of %s to others are lost, for one: %v",
					changes, servers, len(others), s.Name, others[0])
			}
			if expected == 0 {
				t.Errorf("%v of %d servers removed: %s had no connection to them", changes, servers, s.Name)
			}
		}
		reconfigure(t, l, settings)
	}
	if lostAlone == 0 {
		t.Error("no connection needs former generations")
	}
}

// each calls a function with the number of every connection, several at a time. It fails the test
// on an error.
func each(t *testing.T, connections []*connection, f func(i int) error) {
	t.Helper()
	var group errgroup.Group
	group.SetLimit(32)
	for i := range connections {
		group.Go(func() error { return f(i) })
	}
	must(t, group.Wait())
}

// losses counts the failed connections of a service: the number of those to removed servers, and
// the causes of the others.
func losses(live []*connection, s lab.Service, removed []string) (expected int, others []error) {
	for _, c := range live {
		switch {
		case c.service.Name != s.Name || c.err == nil:
		case slices.Contains(removed, c.server):
			expected++
		default:
			others = append(others, fmt.Errorf("at %s: %w", c.server, c.err))
		}
	}
	return expected, others
}
