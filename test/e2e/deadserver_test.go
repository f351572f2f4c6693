// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/lab"
)

// hurryNeighbours makes the balancers' kernels check known neighbours after a short time. By
// default they trust an entry for half a minute. A changed default does not affect existing
// entries.
func hurryNeighbours(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		for _, family := range []string{"ipv4", "ipv6"} {
			for _, timer := range []string{"base_reachable_time_ms=500", "delay_first_probe_time=1", "ucast_solicit=1"} {
				command(t, l, name, "sysctl", "-w", fmt.Sprintf("net.%s.neigh.eth0.%s", family, timer))
			}
		}
		command(t, l, name, "ip", "neigh", "flush", "dev", "eth0")
	}
}

// way is the next hop of a server, and the use that a balancer makes of the server.
type way struct {
	mac    string  // MAC address of the next hop; empty: there is none
	silent bool    // the next hop does not answer
	share  float64 // share of the new connections
}

// ways are the ways to a balancer's servers, by "service/server".
type ways map[string]way

func waysOf(t *testing.T, view *inspect.View) ways {
	t.Helper()
	snapshot, err := view.Snapshot()
	must(t, err)
	all := ways{}
	for _, service := range snapshot.Services {
		for _, server := range service.Servers {
			w := way{share: server.Share, silent: slices.Contains(server.Causes, inspect.ServerUnreachable)}
			if hop := server.NextHop; hop != nil {
				w.mac = hop.MAC
			}
			all[service.Name+"/"+server.Name] = w
		}
	}
	return all
}

// viewsOf returns views of all balancers.
func viewsOf(t *testing.T, l *lab.Lab) (views []*inspect.View) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleBalancer) {
		view, err := inspect.OpenView(l.Node(name).Instance())
		must(t, err)
		t.Cleanup(func() { _ = view.Close() })
		views = append(views, view)
	}
	return views
}

// of returns the ways to a server.
func (w ways) of(server string) ways {
	found := maps.Clone(w)
	maps.DeleteFunc(found, func(name string, _ way) bool { return !strings.HasSuffix(name, "/"+server) })
	return found
}

// allAnswer returns an error unless every server of every service is used, by its own MAC address.
func (w ways) allAnswer(macs map[string]string) error {
	for name, way := range w {
		_, server, _ := strings.Cut(name, "/")
		if way.mac != macs[server] || way.silent || way.share == 0 {
			return fmt.Errorf("%s: %+v, its MAC address is %s", name, way, macs[server])
		}
	}
	return nil
}

// macsOf returns the MAC addresses of all servers.
func macsOf(t *testing.T, l *lab.Lab) map[string]string {
	t.Helper()
	macs := map[string]string{}
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Node(name).Do(func() error {
			link, err := net.InterfaceByName("eth0")
			if err == nil {
				macs[name] = link.HardwareAddr.String()
			}
			return err
		}))
	}
	return macs
}

// requests counts how often a balancer's kernel starts to resolve a failed neighbour again.
type requests struct {
	node   *lab.Node
	failed map[string]bool // by address
	count  map[string]int
}

// read reads the neighbour entries of a server.
func (r *requests) read(t *testing.T, server *lab.Node) {
	t.Helper()
	must(t, r.node.Do(func() error {
		all, err := netlink.NeighList(0, netlink.FAMILY_ALL)
		for _, n := range all {
			address := n.IP.String()
			if address != server.IPv6.String() && address != server.IPv4.String() {
				continue
			}
			failed := n.State == netlink.NUD_FAILED
			if r.failed[address] && !failed {
				r.count[address]++
			}
			r.failed[address] = failed
		}
		return err
	}))
}

// TestDeadServer cuts a server's cable. When the balancers have noticed, they send the server no
// new connections, and agree about the next hops while it is away. This holds also while the
// kernel tries to resolve the server, and although the balancers have a default route. Then the
// server comes back, and its connections continue.
func TestDeadServer(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-insert", "http4-encap", "http4-gre", "hunt6-insert", "hunt4-encap"))
	hurryNeighbours(t, l)
	views, macs := viewsOf(t, l), macsOf(t, l)
	for _, view := range views {
		eventually(t, func() error { return waysOf(t, view).allAnswer(macs) })
	}
	var resting []*connection
	for i := range 60 {
		c, err := dial(t.Context(), l, l.Topology.Services[i%len(l.Topology.Services)])
		must(t, err)
		defer c.conn.Close()
		resting = append(resting, c)
	}

	command(t, l, "fabric", "ip", "link", "set", "s1", "down")
	for _, view := range views {
		eventually(t, func() error {
			for name, way := range waysOf(t, view).of("s1") {
				if !way.silent || way.share != 0 {
					return fmt.Errorf("%s: %+v", name, way)
				}
			}
			return nil
		})
	}
	visitors := startVisitors(t, l, 4, l.Topology.Services...)
	stayDead(t, l, views, macs["s1"])
	visitors.more(t, 50)
	visitors.requireContent(t)
	visitors.stop()

	command(t, l, "fabric", "ip", "link", "set", "s1", "up")
	for _, view := range views {
		eventually(t, func() error { return waysOf(t, view).allAnswer(macs) })
	}
	awaitServers(t, l) // they start slowly
	must(t, newClient(l).spread(t.Context(), nodes(l, lab.RoleServer)...))
	for _, c := range resting {
		if server, err := c.request(); err != nil || server != c.server {
			t.Errorf("a connection to %s at %s: answered by %q, %v", c.service.Name, c.server, server, err)
		}
	}
	requireNoDrops(t, l)
}

// stayDead checks the balancers until every balancer's kernel has tried twice more to resolve the
// neighbours of s1.
func stayDead(t *testing.T, l *lab.Lab, views []*inspect.View, mac string) {
	t.Helper()
	var asked []*requests
	for _, name := range nodes(l, lab.RoleBalancer) {
		asked = append(asked, &requests{l.Node(name), map[string]bool{}, map[string]int{}})
	}
	enough := func(r *requests) bool {
		s1 := l.Node("s1")
		return r.count[s1.IPv6.String()] >= 2 && r.count[s1.IPv4.String()] >= 2
	}
	first := waysOf(t, views[0])
	// The kernel needs more than a second to resolve a neighbour in vain.
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		for i, view := range views {
			asked[i].read(t, l.Node("s1"))
			now := waysOf(t, view)
			if !maps.Equal(now, first) {
				t.Fatalf("%s: the servers were %v, and are %v", asked[i].node.Name, first, now)
			}
			for name, way := range now.of("s1") {
				if way.mac != mac || !way.silent {
					t.Fatalf("%s: %s: %+v, its MAC address is %s", asked[i].node.Name, name, way, mac)
				}
			}
			requireMetrics(t, l, asked[i].node.Name, "s1")
		}
		if !slices.ContainsFunc(asked, func(r *requests) bool { return !enough(r) }) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the kernel does not ask for s1: %v, %v", asked[0].count, asked[1].count)
		}
	}
}

// requireMetrics fails the test unless a balancer's metrics show 0 for exactly one server's next
// hops.
func requireMetrics(t *testing.T, l *lab.Lab, balancer, without string) {
	t.Helper()
	metrics := command(t, l, balancer, "curl", "-sS", "--fail", "http://127.0.0.1:9188/metrics")
	for _, s := range l.Topology.Services {
		for _, server := range nodes(l, lab.RoleServer) {
			name := fmt.Sprintf("segue_lb_server_next_hop{server=%q,service=%q}", server, s.Name)
			if known := counter(t, metrics, name); (known == 1) != (server != without) {
				t.Fatalf("%s: %s is %d", balancer, name, known)
			}
		}
	}
}

// TestWithdrawnRoute removes the routes to a server's locator from the balancers, which have a
// default route. The balancers do not use the default route, even after a restart. Until the route
// is back, other servers get the new connections.
func TestWithdrawnRoute(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-insert", "hunt4-encap"))
	views, macs := viewsOf(t, l), macsOf(t, l)
	for _, view := range views {
		eventually(t, func() error { return waysOf(t, view).allAnswer(macs) })
	}
	s1 := l.Node("s1")
	lost := func() error {
		for i, view := range views {
			for name, w := range waysOf(t, view).of("s1") {
				if w != (way{}) {
					return fmt.Errorf("lb%d: %s: %+v", i+1, name, w)
				}
			}
		}
		return nil
	}
	for _, name := range nodes(l, lab.RoleBalancer) {
		command(t, l, name, "ip", "route", "del", s1.Locator.String())
	}
	eventually(t, lost)
	visitors := startVisitors(t, l, 4, l.Topology.Services...)
	visitors.more(t, 50)
	must(t, lost())
	must(t, l.Process("lb1", "lb").Kill())
	must(t, l.Process("lb1", "lb").Start(t.Context()))
	visitors.more(t, 50)
	must(t, lost())
	for _, name := range nodes(l, lab.RoleBalancer) {
		command(t, l, name, "ip", "route", "add", s1.Locator.String(), "via", s1.IPv6.String())
	}
	for _, view := range views {
		eventually(t, func() error { return waysOf(t, view).allAnswer(macs) })
	}
	visitors.requireContent(t)
}
