// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// Packets to a server stay counted by reason after the server was removed. They do not count as
// packets to the next server in its slot.
func TestCountersOutliveServers(t *testing.T) {
	t.Parallel()
	a, b := srv6Server("a", 1, 1), srv6Server("b", 2, 1)
	f := open(t, webOf(a))
	registry := newRegistry(f)
	f.run(frameOf(web))
	for range 3 {
		f.run(frameOf(web, packet.Flags(packet.ACK)))
	}
	slot := f.slot("web", "a")
	if placed, answered := f.plane.Loads.Placed(slot); placed != 1 || answered != 1 {
		t.Errorf("%d flows placed, %d answered", placed, answered)
	}
	without := func(servers ...desired.Server) *desired.Balancer {
		cfg := webOf(servers...)
		cfg.Node = f.cfg.Node
		return cfg
	}
	f.mustApply(without(b))
	f.must(f.sweep())
	f.must(f.sweep())
	f.mustApply(without(a, b))
	if got := f.slot("web", "a"); got != slot {
		t.Fatalf("the server has slot %d now, not %d: nothing is tested", got, slot)
	}
	if placed, answered := f.plane.Loads.Placed(slot); placed != 0 || answered != 0 {
		t.Errorf("the next server begins with %d flows placed, %d answered", placed, answered)
	}
	lines := strings.Split(expose(t, registry), "\n")
	for _, want := range []string{
		`segue_lb_packets_total{reason="forward_new"} 1`, `segue_lb_packets_total{reason="forward_known"} 3`,
		`segue_lb_bytes_total{reason="forward_known"} 180`,
		`segue_lb_server_packets_total{server="a",service="web"} 0`,
	} {
		if !slices.Contains(lines, want) {
			t.Errorf("no line %q in\n%s", want, strings.Join(lines, "\n"))
		}
	}
}
