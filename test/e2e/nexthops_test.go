// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/segue-lb/segue/lab"
)

// TestServersMACChanges changes the MAC address of a server's interface. No host is notified, so
// the balancers' neighbour entries must expire.
func TestServersMACChanges(t *testing.T) {
	t.Parallel()
	l := up(t, topology(mixed...))
	hurryNeighbours(t, l)
	live := open(t, l, 100, l.Topology.Services...)
	live.rounds(t, 1)
	command(t, l, "s1", "ip", "link", "set", "eth0", "address", "02:00:00:00:5e:01")
	live.rounds(t, 2)
	live.requireUnbroken(t)
	// Until the kernel notices, the server gets no new connections.
	eventually(t, func() error { return newClient(l).spread(t.Context(), nodes(l, lab.RoleServer)...) })
}

// TestRouteToServerChanges changes the route to a server's locator to lead through another server,
// and back.
func TestRouteToServerChanges(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-insert", "http6-encap", "http4-encap"))
	live := open(t, l, 100, l.Topology.Services...)
	live.rounds(t, 1)
	s1, s2 := l.Node("s1"), l.Node("s2")
	passedOn := func() int {
		return counter(t, command(t, l, "s2", "cat", "/proc/net/snmp6"), "Ip6OutForwDatagrams")
	}
	if n := passedOn(); n != 0 {
		t.Fatalf("s2 forwarded %d packets before anything led there", n)
	}
	lead := func(by *lab.Node) {
		for _, name := range nodes(l, lab.RoleBalancer) {
			command(t, l, name, "ip", "route", "replace", s1.Locator.String(), "via", by.IPv6.String())
		}
	}
	lead(s2)
	eventually(t, func() error {
		if passedOn() == 0 {
			return fmt.Errorf("no packet for s1 comes by s2")
		}
		return nil
	})
	live.rounds(t, 2)
	lead(s1)
	eventually(t, func() error {
		before := passedOn()
		live.rounds(t, 2)
		if after := passedOn(); after != before {
			return fmt.Errorf("s2 still gets packets for s1: %d, then %d", before, after)
		}
		return nil
	})
	live.requireUnbroken(t)
	requireNoDrops(t, l)
}

// counter reads a value from a file of names and values.
func counter(t *testing.T, text, name string) (value int) {
	t.Helper()
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) == 2 && fields[0] == name {
			_, err := fmt.Sscan(fields[1], &value)
			must(t, err)
			return value
		}
	}
	t.Fatalf("there is no counter %s", name)
	return 0
}
