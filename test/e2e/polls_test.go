// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestPolledTurns gives one of three servers a capacity of 400 and the others 100, which only their
// agents know. With placement weighted-round-robin, the balancer polls them, and the server gets
// two thirds of the connections.
func TestPolledTurns(t *testing.T) {
	t.Parallel()
	polled := topology("http6-insert")
	s := &polled.Services[0]
	s.Placement = desired.PlacementWeightedTurns
	s.Load = desired.Source{Kind: desired.LoadConnections, Capacity: 100}
	s.Exceptions = []lab.Exception{
		{Server: "s1", Load: desired.Source{Kind: desired.LoadConnections, Capacity: 400}},
	}
	l := up(t, polled)
	const connections = 300
	// A weight is capacity / (busy + 1), and polls see a few connections. With equal weights, 100
	// connections would be expected.
	eventually(t, func() error {
		report := generate(t, l, "--rate", "300", "--requests", fmt.Sprint(connections),
			fmt.Sprintf("http://%s/1kB", s.Address()))
		if report.Succeeded != connections {
			t.Fatalf("%d of %d requests succeeded: %v", report.Succeeded, connections, report.Errors)
		}
		for _, server := range report.Servers {
			if n := server.Responses; server.Name == "s1" && (n < 160 || n > 240) {
				return fmt.Errorf("s1 has %d of %d connections, want about 200", n, connections)
			}
		}
		return nil
	})
	requireNoDrops(t, l)
	requirePolled(t, l)
}

// requirePolled requires that status and trace show what the agents told.
func requirePolled(t *testing.T, l *lab.Lab) {
	t.Helper()
	n := l.Node("lb1")
	status := command(t, l, n.Name, segue, "status", "-i", n.Instance(), "--interval", "0s")
	if strings.Count(status, " of 100, ") != 2 || strings.Count(status, " of 400, ") != 1 {
		t.Errorf("status shows other loads:\n%s", status)
	}
	trace := command(t, l, n.Name, segue, "trace", "-i", n.Instance(), "tcp", "[2001:db8:c::2]:7",
		service(t, l, "http6-insert").Address().String())
	if !strings.Contains(trace, "in turn by weights, of 3 servers: s") {
		t.Errorf("a trace shows no turn:\n%s", trace)
	}
}
