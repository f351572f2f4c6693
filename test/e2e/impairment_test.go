package e2e

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/config"
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

// TestHuntingOverBadLinks makes connections to services that hunt over the same links: SYNs are repeated
// and hunt again, servers' answers are lost, come late or twice, and losers have to be told. Each
// connection is answered, by the only server that ever had it.
func TestHuntingOverBadLinks(t *testing.T) {
	const connections, atATime = 10_000, 2000
	topology := hunting(huntingServices(2)...)
	topology.Applications = []lab.Application{lab.Nginx}
	topology.Servers = 4
	topology.Services[0].Selection = config.SelectRandom
	l := up(t, topology)
	must(t, l.Impair(t.Context(), lab.Impairment{Drop: "5%", Reorder: "5%"}))
	before := map[string]counts{}
	for _, n := range l.Nodes {
		before[n.Name] = tcpOf(t, n)
	}
	for _, s := range l.Topology.Services[:2] {
		start := time.Now()
		var group errgroup.Group
		group.SetLimit(atATime)
		servers := make([]string, connections)
		var failed atomic.Int64
		durations := make([]time.Duration, connections)
		for i := range servers {
			group.Go(func() (err error) {
				start := time.Now()
				if servers[i], err = ask(t.Context(), l, s); err != nil {
					if failed.Add(1) <= 5 {
						t.Errorf("connection %d: %v", i, err)
					}
				}
				durations[i] = time.Since(start)
				return nil
			})
		}
		must(t, group.Wait())
		slices.Sort(durations)
		t.Logf("%s: %v, failed %d; median %v 99%% %v max %v", s.Name, time.Since(start), failed.Load(), durations[connections/2], durations[connections*99/100], durations[connections-1])
		answered := counts{}
		for _, server := range servers {
			answered[server]++
		}
		for _, n := range l.Nodes {
			now := tcpOf(t, n)
			grown := now.since(t, before[n.Name])
			before[n.Name] = now
			t.Logf("%s: answered %d, %v", n.Name, answered[n.Name], grown)
			switch n.Role {
			case lab.RoleServer:
				if grown["PassiveOpens"] != answered[n.Name] {
					t.Errorf("%s answered %d connections, and had %d", n.Name, answered[n.Name], grown["PassiveOpens"])
				}
			}
		}
	}
	for _, n := range l.Nodes {
		if n.Role == lab.RoleBalancer || n.Role == lab.RoleServer {
			t.Logf("%s: %v", n.Name, packetCounts(t, n).with(""))
		}
	}
	c, err := l.ImpairmentCounts()
	must(t, err)
	t.Logf("%+v", c)
	t.Logf("overflows %v", linkOverflows(t, l).with(""))
}

// ask makes a request on a connection of its own, and returns the server that answered.
func ask(ctx context.Context, l *lab.Lab, s lab.Service) (server string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := l.Node("client").Dial(ctx, "tcp", s.Address().String())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: e2e\r\nConnection: close\r\n\r\n"); err != nil {
		return "", fmt.Errorf("%s: %w", conn.LocalAddr(), err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil {
		return "", fmt.Errorf("%s: after %d bytes: %w", conn.LocalAddr(), len(answer), err)
	}
	_, server, _ = strings.Cut(string(answer), "\r\n\r\n")
	return strings.TrimSpace(server), nil
}

// tcpOf are the kernel's counters of TCP at a node (RFC 4022).
func tcpOf(t *testing.T, n *lab.Node) counts {
	all := counts{}
	for name, count := range protocolCounts(t, n, "snmp") {
		if name, isTCP := strings.CutPrefix(name, "Tcp:"); isTCP && name != "CurrEstab" && name != "MaxConn" {
			all[name] = uint64(count)
		}
	}
	for name, count := range protocolCounts(t, n, "netstat") {
		if name, isTCP := strings.CutPrefix(name, "TcpExt:"); isTCP && os.Getenv("EXT") != "" {
			all[name] = uint64(count)
		}
	}
	return all
}
