// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// comparingServices are hunting services with policy least. Each has four candidates.
func comparingServices() []lab.Service {
	services := huntingServices(4)
	for i := range services {
		services[i].Accept = desired.Accept{Policy: desired.AcceptLeast}
	}
	return services
}

// TestLeastKeepsConnectionsEven opens 600 connections that stay open, to six servers, with no
// parameter set. The load is the number of open connections, which has no capacity. So the last of
// the four candidates always compares. The numbers of the servers then differ by two from an even
// number at most.
func TestLeastKeepsConnectionsEven(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	const connections, tolerance = 600, 2
	topology := hunting(comparingServices()...)
	topology.Servers = 6
	l := up(t, topology)
	for _, s := range l.Topology.Services {
		all, _ := openEvenly(t, l, s, connections, tolerance)
		requireHandBacks(t, l, s, connections)
		for _, c := range all { // Apache has no workers for those of three services
			must(t, c.conn.Close())
		}
	}
	requireNoDrops(t, l)
}

// openEvenly opens connections to a service, one after the other, and returns their number by
// server. It fails the test if a server's number differs from an even one by more than the
// tolerance.
func openEvenly(t *testing.T, l *lab.Lab, s lab.Service, connections, tolerance int) (all []*connection, open map[string]int) {
	t.Helper()
	open = map[string]int{}
	for range connections {
		c, err := dial(t.Context(), l, s)
		must(t, err)
		all = append(all, c)
		open[c.server]++
	}
	t.Logf("%s: %v", s.Name, open)
	servers := nodes(l, lab.RoleServer)
	for _, server := range servers {
		even := connections / len(servers)
		if n := open[server]; n < even-tolerance || n > even+tolerance {
			t.Errorf("%s: %s has %d of %d connections, want %d ± %d", s.Name, server, n, connections, even, tolerance)
		}
	}
	return all, open
}

// requireHandBacks fails the test unless servers took back the connections that others handed back,
// and accepted all connections by comparison. No SYN was lost, because no link loses packets.
func requireHandBacks(t *testing.T, l *lab.Lab, s lab.Service, connections uint64) {
	t.Helper()
	sum := map[string]uint64{}
	for _, server := range nodes(l, lab.RoleServer) {
		states, err := l.Node(server).AcceptStates()
		must(t, err)
		for result, n := range states[s.Name].Offers {
			sum[result] += n
		}
	}
	if sum["returned"] == 0 || sum["returned"] != sum["taken_back"] || sum["accepted"] > 0 || sum["forced"] > 0 ||
		sum["accepted_least"]+sum["taken_back"] != connections {
		t.Errorf("%s: %d connections were offered as %v", s.Name, connections, sum)
	}
}

// TestHandBacksOnTheWire has tshark dissect every packet on every link of the fabric, while servers
// compare their loads and hand connections back.
func TestHandBacksOnTheWire(t *testing.T) {
	t.Parallel()
	testhost.NeedCgroup2(t)
	topology := hunting(comparingServices()...)
	topology.Balancers, topology.Servers = 1, 5
	l := up(t, topology)
	// tshark checks checksums, so the switch must have computed them when packets leave it.
	for _, port := range append(nodes(l, lab.RoleServer), "edge") {
		command(t, l, "fabric", "ethtool", "-K", port, "tx", "off")
	}
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			var file sharedFile
			tap, err := l.Node("fabric").Capture(lab.Every, &file)
			must(t, err)
			for range 30 {
				c, err := dial(t.Context(), l, s)
				must(t, err)
				t.Cleanup(func() { c.conn.Close() })
			}
			var hops []hop
			eventually(t, func() error {
				hops = hopsOf(t, l, &file)
				return answered(hops, 30)
			})
			must(t, tap.Stop())
			frames := make([][]byte, len(hops))
			for i := range hops {
				frames[i] = hops[i].frame
			}
			backs := 0
			for i, d := range packettest.Dissect(t, frames, wireFields...) {
				if len(d.Problems) > 0 {
					t.Errorf("%s > %s: %s: %v", hops[i].from, hops[i].to, d.Protocols, d.Problems)
				}
				if isHandBack(t, hops[i], d) {
					backs++
				}
			}
			if backs == 0 {
				t.Error("no connection was handed back")
			}
			t.Logf("%d packets, %d handed back", len(hops), backs)
		})
	}
	requireNoDrops(t, l)
}

// answered returns an error unless the client has acknowledged data of n servers' connections.
func answered(hops []hop, n int) error {
	ports := map[uint16]bool{}
	for _, h := range hops {
		if h.from == "edge" && h.tcp.ACK && !h.tcp.SYN && h.tcp.Seq > 0 {
			ports[uint16(h.tcp.SrcPort)] = true
		}
	}
	if len(ports) < n {
		return errors.New(fmt.Sprint(len(ports), " of ", n, " connections have sent data"))
	}
	return nil
}

// isHandBack tells whether a packet goes back to a server that has told its load. Then the list,
// the destination and the number of segments left must be those of the specification.
func isHandBack(t *testing.T, h hop, d packettest.Dissection) bool {
	t.Helper()
	if len(d.Fields["ipv6.dst"]) == 0 || len(d.Fields["ipv6.routing.srh.addr"]) == 0 {
		return false
	}
	to, err := netip.ParseAddr(d.Fields["ipv6.dst"][0])
	must(t, err)
	sid := srv6.Parse(to)
	if sid.Function != srv6.ConnectForce || srv6.ParseOffer(sid.Argument).Next == 0 {
		return false
	}
	list, left := d.Fields["ipv6.routing.srh.addr"], number(t, d, "ipv6.routing.segleft")
	first := sid
	first.Function = srv6.ConnectAvail
	if list[left] != to.String() || !slices.Contains(list, first.Addr().String()) {
		t.Errorf("%s > %s: to %v with segments left %d of %v", h.from, h.to, sid, left, list)
	}
	return true
}
