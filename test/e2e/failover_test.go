// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/lab"
)

// TestServersAndABalancerFailAtOnce removes some of 48 servers. At the same moment the edge router
// sends every connection to the other balancer, which knows none. 6LB's figure 11d counts the
// connections that are reset, in addition to those of the removed servers, because their server is
// no longer in the row of their bucket: up to 2% with two candidates, and 4% with a single choice.
// Segue resets none, because it also visits the candidates of the row before the change.
func TestServersAndABalancerFailAtOnce(t *testing.T) {
	hunts := huntingServices(2)[0]
	hunts.Accept = config.Accept{Policy: config.AcceptStatic, Threshold: new(uint32(liveConnections / 48))}
	hashes := lab.Service{Name: "single", VIP: hunts.VIP, Port: 81, Protocol: config.TCP, Encapsulation: hunts.Encapsulation}
	topology := hunting(hunts, hashes)
	topology.Servers, topology.Applications = 48, []lab.Application{lab.Nginx}
	l := up(t, topology)
	all := nodes(l, lab.RoleServer)
	lost := map[string]int{}
	for _, x := range []int{1, 2, 4, 8} {
		awaitServers(t, l) // so that it is the table before the change
		must(t, l.SetNextHops("lb1"))
		live := make([]*connection, 2*liveConnections)
		each(t, live, func(i int) (err error) {
			live[i], err = dial(t.Context(), l, l.Topology.Services[i%2])
			return err
		})
		reconfigure(t, l, func(cfg *config.Balancer) { keepServers(cfg, all[x:]...) })
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
			removed, others := losses(live, s, all[:x])
			t.Logf("%d of 48 servers removed: %s loses %d of %d connections with them, and %d others", x, s.Name,
				removed, liveConnections, len(others))
			if s.Name == hunts.Name && len(others) > 0 {
				t.Errorf("%d of 48 servers removed: %d connections to others are lost, for one: %v", x, len(others), others[0])
			}
			if removed == 0 {
				t.Errorf("%d of 48 servers removed: %s had no connection to them", x, s.Name)
			}
			lost[s.Name] += len(others)
		}
		reconfigure(t, l, func(*config.Balancer) {})
	}
	if lost[hunts.Name] >= lost[hashes.Name] {
		t.Errorf("connections to servers that stayed are lost: %v", lost)
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
