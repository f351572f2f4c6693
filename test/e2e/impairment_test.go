package e2e

import (
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/lab"
)

// TestConnectionsOverBadLinks makes connections while the fabric drops and reorders packets, from host
// to host: two in eleven of those from the client do not arrive at a server, or not in order.
func TestConnectionsOverBadLinks(t *testing.T) {
	const connections, atATime = 2000, 1000
	l := up(t, topology(mixed...))
	must(t, l.Impair(t.Context(), lab.Impairment{Drop: "5%", Reorder: "5%"}))
	c := newClient(l)
	var group errgroup.Group
	group.SetLimit(atATime)
	for i := range connections {
		s := l.Topology.Services[i%len(l.Topology.Services)]
		group.Go(func() error { return c.download(t.Context(), s, 1e3) })
	}
	for _, s := range l.Topology.Services {
		group.Go(func() error { return c.download(t.Context(), s, 100e3) })
		group.Go(func() error { return c.upload(t.Context(), s, 100e3) })
	}
	must(t, group.Wait())
	counts, err := l.ImpairmentCounts()
	must(t, err)
	t.Logf("packets by the node that they were sent to: %+v", counts)
	for _, n := range l.Nodes {
		if n.Role != lab.RoleEdge && n.Role != lab.RoleBalancer && n.Role != lab.RoleServer {
			continue
		}
		// 5% ± 2% are more than four standard deviations of 2,000 packets, and of more packets more.
		if c := counts[n.Name]; c.Packets < 2000 || !near(c.Dropped, c.Packets) || !near(c.Reordered, c.Packets) {
			t.Errorf("%s: impaired were %+v", n.Name, c)
		}
	}
	requireNoDrops(t, l)
}

// near tells whether a count is from 3% to 7% of all.
func near(count, all uint64) bool { return 100*count > 3*all && 100*count < 7*all }
