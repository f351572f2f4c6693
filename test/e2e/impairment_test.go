// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// TestConnectionsOverBadLinks makes connections while the fabric drops and reorders packets between
// hosts. Two in eleven of the client's packets do not arrive at a server, or arrive out of order.
func TestConnectionsOverBadLinks(t *testing.T) {
	t.Parallel()
	testhost.NeedTUN(t)
	const connections, atATime = 2000, 1000
	l := up(t, topology(mixed...))
	c := newClient(l)
	resolveNeighbours(t, l, c)
	must(t, l.Impair(t.Context(), lab.Impairment{Drop: "5%", Reorder: "5%"}))
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
		// 5% ± 2% is more than four standard deviations for 2,000 packets, and more for more
		// packets.
		if c := counts[n.Name]; c.Packets < 2000 || !near(c.Dropped, c.Packets) || !near(c.Reordered, c.Packets) {
			t.Errorf("%s: impaired were %+v", n.Name, c)
		}
	}
	requireNoDrops(t, l)
}

// resolveNeighbours makes connections to all services, so that the nodes know their neighbours. If
// all three requests for a neighbour are dropped, connections fail with "no route to host".
func resolveNeighbours(t *testing.T, l *lab.Lab, c *client) {
	t.Helper()
	for _, s := range l.Topology.Services {
		for range 5 * l.Topology.Servers {
			must(t, c.download(t.Context(), s, 1e3))
		}
	}
}

var badLinksConnections = flag.Int("badlinks.connections", 5000, "how many connections TestHuntingOverBadLinks makes")

// TestHuntingOverBadLinks makes connections over the same links to services that hunt. SYNs are
// repeated and offered again. Servers' answers are lost. A server whose SYN-ACK was lost may
// answer again after another server has accepted the connection. Still, every connection is
// answered, by the only server that ever accepted it, and none is reset.
func TestHuntingOverBadLinks(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	testhost.NeedTUN(t)
	const atATime = 2000
	connections := *badLinksConnections
	topology := topology()
	// Inserted segment lists and random candidates; and encapsulated packets, whose candidates
	// compare their loads and report them.
	topology.Services = []lab.Service{huntingServices(2)[0], reportingServices(desired.SelectReports)[1]}
	topology.Services[0].Selection = desired.SelectRandom
	l := up(t, topology)
	endTailsEarly(t, l)
	before := passiveOpens(t, l) // includes the connections that tested whether servers listen
	must(t, l.Impair(t.Context(), lab.Impairment{Drop: "5%", Reorder: "5%", Duplicate: "5%"}))
	answered := make(chan string, connections)
	var group errgroup.Group
	group.SetLimit(atATime)
	for i := range connections {
		s := topology.Services[i%len(topology.Services)]
		group.Go(func() error {
			server, err := ask(t.Context(), l, s)
			answered <- server
			return err
		})
	}
	must(t, group.Wait())
	close(answered)
	connectionsOf := map[string]int64{}
	for server := range answered {
		connectionsOf[server]++
	}
	surplus := int64(0)
	for name, opens := range passiveOpens(t, l) {
		had := opens - before[name]
		if had < connectionsOf[name] {
			t.Errorf("%s answered %d connections, and had %d", name, connectionsOf[name], had)
		}
		surplus += had - connectionsOf[name]
	}
	// Balancers make connections of their own to servers that seem to leave offers unanswered.
	calls := protocolCounts(t, l.Node("lb1"), "snmp")["Tcp:ActiveOpens"] + protocolCounts(t, l.Node("lb2"), "snmp")["Tcp:ActiveOpens"]
	if surplus > int64(calls) {
		t.Errorf("the servers had %d connections that no client used, and the balancers made %d", surplus, calls)
	}
	tcp := protocolCounts(t, l.Node("client"), "snmp")
	if refused, reset := tcp["Tcp:AttemptFails"], tcp["Tcp:EstabResets"]; refused > 0 || reset > 0 {
		t.Errorf("%d connections were refused, %d reset", refused, reset)
	}
	requireTroubles(t, l)
}

// passiveOpens returns the number of connections that each server has accepted.
func passiveOpens(t *testing.T, l *lab.Lab) map[string]int64 {
	t.Helper()
	opens := map[string]int64{}
	for _, name := range nodes(l, lab.RoleServer) {
		opens[name] = protocolCounts(t, l.Node(name), "snmp")["Tcp:PassiveOpens"]
	}
	return opens
}

// endTailsEarly makes hosts retransmit at equal intervals at first. With intervals that double, the
// last of many connections would take much longer than all others.
func endTailsEarly(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, n := range l.Nodes {
		if n.Role == lab.RoleClient || n.Role == lab.RoleServer {
			command(t, l, n.Name, "sysctl", "-qw", "net.ipv4.tcp_thin_linear_timeouts=1")
		}
	}
}

// ask makes a request on a new connection, and returns the server that answered.
func ask(ctx context.Context, l *lab.Lab, s lab.Service) (server string, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	conn, err := l.Node("client").Dial(ctx, "tcp", s.Address().String())
	if err != nil {
		return "", fmt.Errorf("service %s: %w", s.Name, err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: e2e\r\nConnection: close\r\n\r\n"); err != nil {
		return "", fmt.Errorf("service %s: %w", s.Name, err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil {
		return "", fmt.Errorf("service %s: after %d bytes: %w", s.Name, len(answer), err)
	}
	_, server, _ = strings.Cut(string(answer), "\r\n\r\n")
	return strings.TrimSpace(server), nil
}

// requireTroubles fails the test unless the tested events have occurred: servers have passed
// connections on, and servers have accepted a connection that another server had.
func requireTroubles(t *testing.T, l *lab.Lab) {
	t.Helper()
	all := counts{}
	for _, n := range l.Nodes {
		if n.Role == lab.RoleBalancer || n.Role == lab.RoleServer {
			for reason, packets := range packetCounts(t, n) {
				all[reason] += packets
			}
		}
	}
	t.Logf("packets: %v", all.with(""))
	for _, reason := range []string{"next_refused", "next_returned", "forward_reset"} {
		if all[reason] == 0 {
			t.Errorf("no packet was %s", reason)
		}
	}
}

// near tells whether a count is between 3% and 7% of all.
func near(count, all uint64) bool { return 100*count > 3*all && 100*count < 7*all }
