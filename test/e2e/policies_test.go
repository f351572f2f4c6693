// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// rows reads the candidates of connections in the balancers' tables in the kernel.
type rows struct {
	view *inspect.View
	port int // port of the last connection; below the kernel's ephemeral ports
}

func openRows(t *testing.T, l *lab.Lab) *rows {
	t.Helper()
	view, err := inspect.OpenView(l.Node("lb1").Instance())
	must(t, err)
	t.Cleanup(func() { view.Close() })
	return &rows{view: view, port: 20000}
}

// candidates returns the candidates of a connection from the next port, in the order in which a
// packet other than a SYN visits them.
func (r *rows) candidates(t *testing.T, s lab.Service) []string {
	t.Helper()
	r.port++
	source := netip.MustParseAddr("2001:db8:c::2")
	if s.VIP.Is4() {
		source = netip.MustParseAddr("198.51.100.2")
	}
	trace, err := r.view.Trace(inspect.Packet{Length: 60, Flow: dataplane.Flow{
		Protocol: desired.TCP, Source: netip.AddrPortFrom(source, uint16(r.port)), Destination: s.Address(),
	}})
	must(t, err)
	if trace.Placement == nil {
		t.Fatalf("%s: a packet from port %d is %s", s.Name, r.port, trace.Reason)
	}
	return trace.Placement.Candidates
}

// open opens a connection to a service from an unused port. It also returns the connection's
// candidates.
func (r *rows) open(t *testing.T, l *lab.Lab, s lab.Service) (c *connection, candidates []string) {
	t.Helper()
	candidates = r.candidates(t, s)
	c, err := dialFrom(t.Context(), l, s, r.port)
	must(t, err)
	return c, candidates
}

// TestFixedPolicies uses servers that always accept connections. After a reload it uses servers
// that never accept unless they must. At first the first candidate gets each connection, and then
// the last candidate.
func TestFixedPolicies(t *testing.T) {
	t.Parallel()
	topology := hunting(append(huntingServices(2), huntingServices(4)...)...)
	topology.Servers = 4
	l := up(t, topology)
	rows := openRows(t, l)
	for _, policy := range []desired.AcceptPolicy{desired.AcceptAlways, desired.AcceptNever} {
		accept(t, l, desired.Accept{Policy: policy})
		for _, s := range l.Topology.Services {
			taken := map[string]int{}
			for range 40 {
				c, candidates := rows.open(t, l, s)
				want := candidates[0]
				if policy == desired.AcceptNever {
					want = candidates[s.Candidates-1]
				}
				if c.server != want {
					t.Errorf("%s, policy %s: %s has a connection of candidates %v", s.Name, policy, c.server, candidates)
				}
				taken[c.server]++
				must(t, c.conn.Close())
			}
			if len(taken) < 4 {
				t.Errorf("%s, policy %s: not every server has connections: %v", s.Name, policy, taken)
			}
		}
	}
	requireNoDrops(t, l)
}

// TestStaticPolicy keeps connections open, and compares the server that accepts each connection
// with 6LB's algorithm 1. The first of two candidates accepts while it has fewer than four
// connections; otherwise the second accepts. Nothing is random: the rows follow from the servers'
// names, and the ports are fixed.
func TestStaticPolicy(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	const threshold = 4
	topology := hunting(huntingServices(2)...)
	topology.Servers = 4
	l := up(t, topology)
	accept(t, l, desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(threshold))})
	rows := openRows(t, l)
	for _, s := range l.Topology.Services {
		want, open := map[string]offered{}, map[string][]*connection{}
		connect := func(n int) {
			for range n {
				c, candidates := rows.open(t, l, s)
				t.Cleanup(func() { c.conn.Close() })
				taker := algorithm1(want, candidates, threshold)
				if c.server != taker {
					t.Fatalf("%s: %s has a connection of candidates %v, of which %s should have it, of %+v",
						s.Name, c.server, candidates, taker, want)
				}
				open[taker] = append(open[taker], c)
			}
		}
		connect(40)
		for server, o := range want {
			if o.load < threshold {
				t.Errorf("%s: %s is not busy: %+v", s.Name, server, o)
			}
		}
		// Two of the four servers close their connections, and have room again.
		for _, server := range []string{"s2", "s3"} {
			for _, c := range open[server] {
				must(t, c.conn.Close())
			}
			awaitLoad(t, l, server, s.Name, 0)
			o := want[server]
			o.load = 0
			want[server] = o
		}
		connect(20)
		got := map[string]offered{}
		for _, server := range nodes(l, lab.RoleServer) {
			got[server] = offers(t, l, server, s.Name)
			metrics := command(t, l, server, "curl", "-sS", "--fail", "http://127.0.0.1:9189/metrics")
			name := fmt.Sprintf(`segue_agent_offers_total{result="refused",service=%q}`, s.Name)
			if refused := counter(t, metrics, name); refused != want[server].refused {
				t.Errorf("%s: the metrics say that it refused %d of %s, not %d", server, refused, s.Name, want[server].refused)
			}
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(offered{})); diff != "" {
			t.Errorf("%s: what the agents counted (-want +got):\n%s", s.Name, diff)
		}
	}
	requireNoDrops(t, l)
}

// algorithm1 is 6LB's algorithm 1. It returns which of two candidates accepts a connection if
// servers accept below a threshold. It counts as agents do.
func algorithm1(servers map[string]offered, candidates []string, threshold int) (taker string) {
	first, second := servers[candidates[0]], servers[candidates[1]]
	if first.load < threshold {
		first.accepted++
		first.load++
		servers[candidates[0]] = first
		return candidates[0]
	}
	first.refused++
	second.forced++
	second.load++
	servers[candidates[0]], servers[candidates[1]] = first, second
	return candidates[1]
}

// TestRandomCandidates uses random candidates, as in SRLB: any two servers are candidates. Two of
// four servers are busy, so an idle server gets a connection unless both candidates are busy. The
// balancers choose the rows at random. The share of the idle servers is that of the rows with an
// idle server. Half of the connections are accepted by servers that are not in the row of two of
// their own bucket. The tolerance is six standard deviations.
func TestRandomCandidates(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	const connections = 600
	s := huntingServices(2)[0]
	s.Selection = desired.SelectRandom
	topology := hunting(s)
	topology.Servers = 4
	l := up(t, topology)
	accept(t, l, desired.Accept{Policy: desired.AcceptAlways})
	busy := map[string]int{"s1": 0, "s2": 0}
	for deadline := time.Now().Add(patience); busy["s1"] < 4 || busy["s2"] < 4; {
		if time.Now().After(deadline) {
			t.Fatalf("after %v s1 and s2 still have %v connections, not 4 each", patience, busy)
		}
		c, err := dial(t.Context(), l, s)
		must(t, err)
		if _, keep := busy[c.server]; !keep {
			must(t, c.conn.Close())
			continue
		}
		busy[c.server]++
		t.Cleanup(func() { c.conn.Close() })
	}
	accept(t, l, desired.Accept{Policy: desired.AcceptStatic, Threshold: new(uint32(4))})
	rows := openRows(t, l)
	visits, others := map[string]int{}, 0
	for range connections {
		// One connection at a time, so that idle servers stay idle.
		c, own := rows.open(t, l, s)
		must(t, c.conn.Close())
		visits[c.server]++
		if !slices.Contains(own, c.server) {
			others++
		}
	}
	idle := idleShare(t, nodes(l, lab.RoleServer), func(server string) bool { return server == "s3" || server == "s4" })
	requireShare(t, "connections that the idle servers have", visits["s3"]+visits["s4"], connections, idle)
	requireShare(t, "connections that are not in their own row", others, connections, 0.5)
	if len(visits) != 4 {
		t.Errorf("not every server has connections: %v", slices.Sorted(maps.Keys(visits)))
	}
}

// requireShare fails the test unless got of all is near the share, within six standard deviations.
func requireShare(t *testing.T, what string, got, all int, share float64) {
	t.Helper()
	want, tolerance := share*float64(all), 6*math.Sqrt(float64(all)*share*(1-share))
	if math.Abs(float64(got)-want) > tolerance {
		t.Errorf("%s: %d of %d, want %.0f ± %.0f", what, got, all, want, tolerance)
	}
	t.Logf("%s: %d of %d, %.0f expected", what, got, all, want)
}

// idleShare returns the share of rows with an idle server among their two.
func idleShare(t *testing.T, servers []string, idle func(string) bool) float64 {
	t.Helper()
	var all []tables.Server
	for _, name := range servers {
		all = append(all, tables.Server{Name: name, Weight: 1})
	}
	table, err := tables.Build(all, tables.DefaultBuckets, 2)
	must(t, err)
	with := 0
	for b := range table.Buckets {
		if slices.ContainsFunc(table.Row(b), func(i uint16) bool { return idle(servers[i]) }) {
			with++
		}
	}
	return float64(with) / float64(table.Buckets)
}
