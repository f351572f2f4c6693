// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
)

// TestRoundRobin changes a service from hash to round-robin, and opens connections to it through
// one balancer. Each server gets exactly its share of any whole number of cycles. A trace foresees
// the next server, and takes no turn. No connection breaks, neither by the change nor when the edge
// router sends all of them to the other balancer.
func TestRoundRobin(t *testing.T) {
	t.Parallel()
	l := shared(t, topology("http6-encap"))
	s := service(t, l, "http6-encap")
	hashed := open(t, l, 30, s)
	reconfigure(t, l, func(cfg *desired.Balancer) { cfg.Services[0].Placement = desired.PlacementRoundRobin })
	must(t, l.SetNextHops("lb1"))
	hashed.rounds(t, 1)

	const cycles = 40
	connect := func(connections int) map[string]uint64 {
		t.Helper()
		report := generate(t, l, "--rate", "200", "--requests", fmt.Sprint(connections),
			fmt.Sprintf("http://%s/1kB", s.Address()))
		if report.Succeeded != uint64(connections) {
			t.Fatalf("%d of %d requests succeeded: %v", report.Succeeded, connections, report.Errors)
		}
		answered := map[string]uint64{}
		for _, server := range report.Servers {
			answered[server.Name] = server.Responses
		}
		return answered
	}
	want := map[string]uint64{"s1": cycles, "s2": cycles, "s3": cycles}
	if diff := cmp.Diff(want, connect(3*cycles)); diff != "" {
		t.Errorf("connections (-want +got):\n%s", diff)
	}

	n := l.Node("lb1")
	trace := func() string {
		t.Helper()
		return command(t, l, "lb1", segue, "trace", "-i", n.Instance(), "tcp", "[2001:db8:c::2]:7", s.Address().String())
	}
	foreseen := trace()
	if again := trace(); again != foreseen || !strings.Contains(foreseen, "in turn: ") {
		t.Errorf("traces, one after the other:\n%s\n%s", foreseen, again)
	}
	for server := range connect(1) {
		if !strings.Contains(foreseen, "in turn: "+server+",") {
			t.Errorf("the next connection goes to %s, and the trace was\n%s", server, foreseen)
		}
	}

	inTurn := open(t, l, 30, s)
	must(t, l.SetNextHops("lb2"))
	for _, live := range []*load{hashed, inTurn} {
		live.rounds(t, 2)
		live.requireUnbroken(t)
	}
	if counted := packetCounts(t, l.Node("lb2")); counted["forward_recover"] == 0 {
		t.Errorf("lb2 has no connection from lb1: %v", counted)
	}
	requireNoDrops(t, l)
}
