// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// setTimestamps switches TCP timestamps on or off for the later connections of nodes.
func setTimestamps(t *testing.T, l *lab.Lab, on bool, names ...string) {
	t.Helper()
	setting := "net.ipv4.tcp_timestamps=0"
	if on {
		setting = "net.ipv4.tcp_timestamps=1"
	}
	for _, name := range names {
		command(t, l, name, "sysctl", "-w", setting)
	}
}

// openMixed opens n connections with timestamps, and then n without. They make requests rarely,
// because some tests open more and more of them.
func openMixed(t *testing.T, l *lab.Lab, n int, services ...lab.Service) *load {
	t.Helper()
	with := openResting(t, l, n, longestThink, services...)
	setTimestamps(t, l, false, "client")
	without := openResting(t, l, n, longestThink, services...)
	setTimestamps(t, l, true, "client")
	return &load{connections: slices.Concat(with.connections, without.connections)}
}

// requireAllColumns fails the test unless connections use each column of a row of four.
func requireAllColumns(t *testing.T, l *lab.Lab, balancer string, live *load) {
	t.Helper()
	columns := map[int]int{}
	for i, place := range placesOf(t, l, balancer, live) {
		if live.connections[i].service.Candidates == 4 {
			columns[place%4]++
		}
	}
	if len(columns) < 4 {
		t.Errorf("connections by column: %v", columns)
	}
}

var (
	hintServers     = flag.Int("hints.servers", 6, "how many servers TestHintsKeepConnections has")
	hintConnections = flag.Int("hints.connections", 1200,
		"how many connections TestHintsKeepConnections keeps open")
)

// TestHintsKeepConnections has clients with timestamps and without, at all columns of their rows,
// with each persistence that needs no flow table and each placement.
// The balancer's process is killed. All packets go to another balancer, which has no hints.
// Servers come and go. At last a balancer that has just started gets all packets, and its hint
// table is too small for all connections. No connection is lost.
func TestHintsKeepConnections(t *testing.T) {
	t.Parallel()
	var services []lab.Service
	for i, persistence := range withoutFlowTable {
		for _, s := range columnServices(4, persistence) {
			s.Name, s.Port = fmt.Sprint(s.Name, "-", persistence), s.Port+desired.Port(10*i)
			services = append(services, s)
		}
	}
	topology := hunting(services...)
	topology.Servers, topology.Applications = *hintServers, []lab.Application{lab.Nginx}
	l := up(t, refusing(topology))
	must(t, l.SetNextHops("lb1"))
	live := openMixed(t, l, *hintConnections/2, l.Topology.Services...)
	half := *hintConnections / 2
	for _, part := range [][]*connection{live.connections[:half], live.connections[half:]} {
		for _, placement := range []desired.Placement{desired.PlacementHunt, desired.PlacementInfer} {
			requireAllColumns(t, l, "lb1", (&load{connections: part}).of(placement))
		}
	}
	requireHints(t, l, "lb1", live)
	must(t, l.Process("lb1", "lb").Kill())
	requireHints(t, l, "lb1", live)
	must(t, l.Process("lb1", "lb").Start(t.Context()))
	requireHints(t, l, "lb1", live)

	must(t, l.SetNextHops("lb2"))
	recoveries(t, l, "lb2", live)
	if packetCounts(t, l.Node("lb2"))["forward_recover"] == 0 {
		t.Error("lb2 had no hints, and looked for no server")
	}
	requireHints(t, l, "lb2", live)

	all := nodes(l, lab.RoleServer)
	stay, change := all[:len(all)-2], all[len(all)-2:]
	for _, last := range change {
		reconfigure(t, l, func(cfg *desired.Balancer) {
			keepServers(cfg, append(slices.Clone(stay), last)...)
		})
		recoveries(t, l, "lb2", live.to(stay...))
	}
	cfg := l.Node("lb1").BalancerConfig()
	cfg.Node.Limits.Hints = 1024
	keepServers(&cfg, append(slices.Clone(stay), change[1])...)
	must(t, l.Node("lb1").WriteBalancerConfig(cfg))
	startAnew(t, l, "lb1", "lb2")
	before := returned(t, l)
	must(t, l.SetNextHops("lb1"))
	recoveries(t, l, "lb1", live.to(stay...))
	// A returned packet visits all servers, and is not returned again.
	wrong, asked := returned(t, l)-before, packetCounts(t, l.Node("lb1"))["forward_recover"]
	t.Logf("a table for 1024 hints: servers returned %d packets; %d visited several servers", wrong, asked)
	if wrong > asked {
		t.Errorf("servers returned %d packets, but only %d visited several servers", wrong, asked)
	}
	requireNoDrops(t, l)
}

// recoveries makes some requests on all connections, none of which may break. It returns how many
// packets a balancer has sent to several servers.
func recoveries(t *testing.T, l *lab.Lab, balancer string, live *load) uint64 {
	t.Helper()
	before := packetCounts(t, l.Node(balancer))
	live.rounds(t, 1)
	live.requireUnbroken(t)
	return packetCounts(t, l.Node(balancer)).since(t, before)["forward_recover"]
}

// requireHints requires that a balancer sends each packet to one server.
func requireHints(t *testing.T, l *lab.Lab, balancer string, live *load) {
	t.Helper()
	if n := recoveries(t, l, balancer, live); n > 0 {
		t.Errorf("%s sends %d packets to several servers", balancer, n)
	}
}

// returned counts the packets that servers have returned to balancers.
func returned(t *testing.T, l *lab.Lab) (n uint64) {
	t.Helper()
	for _, server := range nodes(l, lab.RoleServer) {
		n += packetCounts(t, l.Node(server))["return_not_local"]
	}
	return n
}
