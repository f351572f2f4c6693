// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// TestSYNFloodWithoutFlowTable sends a flood of SYNs from spoofed sources to services without a
// flow table, first with persistence stateless and then with hint. The hint table is much smaller
// than the flood, and the servers answer each SYN, so they also signal it. No connection breaks,
// new ones open, and the balancers' memory stays the same. TestSYNFlood describes the losses in
// the lab itself.
func TestSYNFloodWithoutFlowTable(t *testing.T) {
	t.Parallel()
	var services []lab.Service
	for i, persistence := range withoutFlowTable {
		s := huntingServices(4)[0]
		s.Name, s.Persistence, s.Port = string(persistence), persistence, desired.Port(80+i)
		services = append(services, s)
	}
	topology := hunting(services...)
	topology.Servers, topology.Applications = 4, []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	restartAnew(t, l, func(cfg *desired.Balancer) { cfg.Node.Limits.Hints = 1024 })
	awaitServers(t, l)
	command(t, l, "edge", "ip", "route", "add", "blackhole", spoofed.String())
	live := openMixed(t, l, 100, services...)
	visitors := startVisitors(t, l, 1, services...)
	for _, s := range services {
		live.rounds(t, 1)
		median, p99 := live.responseTimes()
		before := takeStock(t, l)
		flood := startFlood(t, l, s.Address())
		for start := time.Now(); time.Since(start) < *floodTime/2 || offeredSince(t, l, before) < 10*1024; {
			live.rounds(t, 1)
			visitors.more(t, 5)
			flood.requireRunning(t)
		}
		floodedMedian, floodedP99 := live.responseTimes()
		sent := flood.stop(t)
		live.rounds(t, 1)
		live.requireUnbroken(t)
		visitors.requireContent(t)
		after := takeStock(t, l)
		t.Logf("%s: %d SYNs, %.0f a second; responses take %v (p99 %v) before the flood, "+
			"and %v (p99 %v) during it; the lab's own queues lost %v",
			s.Name, sent.Sent, sent.Rate(), median, p99, floodedMedian, floodedP99, after.lost(t, before))
		requireSameMemory(t, before, after)
		if n := after.resets - before.resets; n > 0 {
			t.Errorf("%s: %d connections were reset", s.Name, n)
		}
	}
	requireNoDrops(t, l)
}

// offeredSince returns the smallest number of SYNs that a balancer has offered since before.
func offeredSince(t *testing.T, l *lab.Lab, before stock) (least uint64) {
	t.Helper()
	for i, name := range nodes(l, lab.RoleBalancer) {
		n := packetCounts(t, l.Node(name)).since(t, before.counts[name])["forward_hunt"]
		if i == 0 || n < least {
			least = n
		}
	}
	return least
}
