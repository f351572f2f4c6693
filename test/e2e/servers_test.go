// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// liveConnections is the number of open connections while a test changes the lab.
const liveConnections = 500

// mixed are services of different encapsulations and families, for tests that do not depend on the
// encapsulation.
var mixed = []string{"http6-insert", "http6-encap", "http4-gre", "http4-ipip"}

// TestServersComeAndGo removes one server and adds another under live connections. Then it drains a
// server and changes weights.
func TestServersComeAndGo(t *testing.T) {
	t.Parallel()
	topology := topology(mixed...)
	topology.Servers = 4
	l := up(t, topology)
	reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, "s1", "s2", "s3") })
	must(t, newClient(l).spread(t.Context(), "s1", "s2", "s3"))
	live := open(t, l, liveConnections, l.Topology.Services...)
	for _, server := range []string{"s1", "s2", "s3"} {
		if n := len(live.at(server)); n < liveConnections/10 {
			t.Errorf("%s has %d of %d connections", server, n, liveConnections)
		}
	}
	live.rounds(t, 1)

	reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, "s2", "s3", "s4") })
	live.rounds(t, 3)
	live.requireUnbroken(t, "s1")
	for _, c := range live.at("s1") {
		if c.failure() == nil {
			t.Fatalf("a connection to %s at s1 goes on although the server was removed", c.service.Name)
		}
	}
	// A new server gets connections when the balancers know its next hop.
	eventually(t, func() error { return newClient(l).spread(t.Context(), "s2", "s3", "s4") })

	// A drained server keeps its connections. The weights of the others do not affect existing
	// connections.
	reconfigure(t, l, func(cfg *desired.Balancer) {
		keepServers(cfg, "s2", "s3", "s4")
		drain(cfg, "s2")
		setWeight(cfg, "s3", 5)
	})
	must(t, newClient(l).spread(t.Context(), "s3", "s4"))
	live.rounds(t, 3)
	live.requireUnbroken(t, "s1")
	requireNoDrops(t, l)
}

// TestRemovedServersConnectionsAreReset removes a server from services that hunt, under live
// connections. Its clients get a reset, in every encapsulation that can hunt and in both families,
// and do not wait for their timeouts.
func TestRemovedServersConnectionsAreReset(t *testing.T) {
	t.Parallel()
	l := shared(t, hunting(huntingServices(2)...))
	live := open(t, l, 300, l.Topology.Services...)
	live.rounds(t, 1)
	reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, "s2", "s3") })
	live.rounds(t, 3)
	live.requireUnbroken(t, "s1")
	resets := map[string]int{}
	for _, c := range live.at("s1") {
		if err := c.failure(); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s: a connection to s1, which is gone: %v, want a reset", c.service.Name, err)
		}
		resets[c.service.Name]++
	}
	for _, s := range l.Topology.Services {
		if resets[s.Name] == 0 {
			t.Errorf("%s had no connection to s1", s.Name)
		}
	}
	var answered uint64
	for _, name := range []string{"s2", "s3"} {
		answered += packetCounts(t, l.Node(name))["deliver_not_local"]
	}
	if answered < uint64(len(live.at("s1"))) {
		t.Errorf("%d connections were at s1, and the others reset %d", len(live.at("s1")), answered)
	}
	requireNoDrops(t, l)
}

// TestServersAreAddedUnderLoad adds a server that the balancers must resolve first. No connection
// is placed on it before that.
func TestServersAreAddedUnderLoad(t *testing.T) {
	t.Parallel()
	l := shared(t, topology(mixed...))
	reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, "s1", "s2") })
	visitors := startVisitors(t, l, 8, l.Topology.Services...)
	for range 3 {
		for _, name := range nodes(l, lab.RoleBalancer) {
			command(t, l, name, "ip", "neigh", "flush", "dev", "eth0", "to", l.Node("s3").IPv6.String())
			command(t, l, name, "ip", "neigh", "flush", "dev", "eth0", "to", l.Node("s3").IPv4.String())
		}
		reconfigure(t, l, func(*desired.Balancer) {})
		visitors.more(t, 50)
		// Its connections end before it is removed again.
		reconfigure(t, l, func(cfg *desired.Balancer) { setWeight(cfg, "s3", 0) })
		visitors.more(t, 50)
		reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, "s1", "s2") })
	}
	visitors.requireContent(t)
	requireNoDrops(t, l)
}

// TestServersAreAddedAtRestart adds a server to a balancer's configuration while the data path
// works without a process. The new process must resolve all servers. Until then it keeps the next
// hops of the previous process.
func TestServersAreAddedAtRestart(t *testing.T) {
	t.Parallel()
	l := shared(t, topology(mixed...))
	reconfigure(t, l, func(cfg *desired.Balancer) { keepServers(cfg, "s1", "s2") })
	visitors := startVisitors(t, l, 8, l.Topology.Services...)
	for _, name := range nodes(l, lab.RoleBalancer) {
		must(t, l.Process(name, "lb").Kill())
		command(t, l, name, "ip", "neigh", "flush", "dev", "eth0")
		must(t, l.Node(name).WriteBalancerConfig(l.Node(name).BalancerConfig()))
		must(t, l.Process(name, "lb").Start(t.Context()))
		visitors.more(t, 50)
	}
	visitors.requireContent(t)
	requireNoDrops(t, l)
}

// TestWeights gives one server three times the weight of the other.
func TestWeights(t *testing.T) {
	t.Parallel()
	l := shared(t, topology("http6-encap"))
	reconfigure(t, l, func(cfg *desired.Balancer) {
		keepServers(cfg, "s1", "s2")
		setWeight(cfg, "s1", 3)
	})
	visits, err := newClient(l).visit(t.Context(), l.Topology.Services[0], 400)
	must(t, err)
	// The expected number is 300. A difference of 60 is seven standard deviations.
	if n := visits["s1"]; n < 240 || n > 360 {
		t.Errorf("of 400 connections %d went to the server of weight 3, %d to that of weight 1", n, visits["s2"])
	}
}

// TestConnectionsSurviveTheLossOfABalancer removes all state from one balancer under live
// connections. The edge router then sends them to the other balancer.
func TestConnectionsSurviveTheLossOfABalancer(t *testing.T) {
	t.Parallel()
	l := up(t, topology(mixed...))
	live := open(t, l, liveConnections, l.Topology.Services...)
	live.rounds(t, 1)
	if counted := packetCounts(t, l.Node("lb1")); counted["forward_new"] < liveConnections/10 {
		t.Fatalf("lb1 has hardly any connections to lose: %v", counted)
	}

	must(t, l.Process("lb1", "lb").Kill())
	command(t, l, "lb1", segue, "lb", "detach", l.Node("lb1").Instance())
	must(t, l.SetNextHops("lb2"))
	live.rounds(t, 3)
	live.requireUnbroken(t)
	if counted := packetCounts(t, l.Node("lb2")); counted["forward_recover"] == 0 {
		t.Errorf("lb2 has no connection from lb1: %v", counted)
	}

	must(t, l.Process("lb1", "lb").Start(t.Context()))
	must(t, l.SetNextHops(nodes(l, lab.RoleBalancer)...))
	live.rounds(t, 3)
	live.requireUnbroken(t)
	if counted := packetCounts(t, l.Node("lb1")); counted["forward_recover"] == 0 {
		t.Errorf("lb1 has none of its connections back: %v", counted)
	}
	requireNoDrops(t, l)
}
