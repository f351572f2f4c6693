// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

// awaitLinks waits until the edge router sends packets for a prefix over the links to exactly these
// balancers, which have two arms.
func awaitLinks(t *testing.T, l *lab.Lab, prefix netip.Prefix, want ...string) {
	t.Helper()
	awaitHops(t, l, prefix, want, func(h viaHop) string { return h.Dev })
}

// viaHop is a next hop of a route, in the output of ip.
type viaHop struct{ Gateway, Dev string }

// awaitHops waits until the next hops of the edge router for a prefix have exactly these names.
func awaitHops(t *testing.T, l *lab.Lab, prefix netip.Prefix, want []string, name func(viaHop) string) {
	t.Helper()
	family := "-4"
	if prefix.Addr().Is6() {
		family = "-6"
	}
	eventually(t, func() error {
		var routes []struct {
			viaHop
			Nexthops []viaHop
		}
		out := command(t, l, "edge", "ip", "-j", family, "route", "show", "exact", prefix.String())
		must(t, json.Unmarshal([]byte(out), &routes))
		var got []string
		for _, r := range routes {
			if r.Dev != "" {
				got = append(got, name(r.viaHop))
			}
			for _, h := range r.Nexthops {
				got = append(got, name(h))
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("%s: next hops %v, want %v: %s", prefix, got, want, out)
		}
		return nil
	})
}

// hostRoute returns the /32 or /128 of an address.
func hostRoute(address netip.Addr) netip.Prefix { return netip.PrefixFrom(address, address.BitLen()) }

// TestBGPUnnumbered runs the configurations of docs/operate/bgp.md for unnumbered peers, of routers
// and of balancers, with the interfaces of a lab. The VIPs of both families can be reached by
// link-local next hops.
func TestBGPUnnumbered(t *testing.T) {
	t.Parallel()
	for router := range strings.SplitSeq(*bgpRouters, ",") {
		t.Run(router, func(t *testing.T) {
			t.Parallel()
			page, err := os.ReadFile("../../docs/operate/bgp.md")
			must(t, err)
			if lab.Router(router) == lab.FRR {
				unnumberedFRR(t, string(page))
			} else {
				unnumberedBIRD(t, string(page))
			}
		})
	}
}

// unnumberedFRR is TestBGPUnnumbered with FRR. Sessions return after the router was restarted, and
// BFD finds a dead host.
func unnumberedFRR(t *testing.T, page string) {
	topology := routed(t, lab.FRR, 2)
	testhost.NeedCommand(t, "bird", "bird2")
	topology.TwoArmed, topology.Edge.BFD = true, true
	l := up(t, topology)
	dir := t.TempDir()
	// Without BFD, the router would notice a dead host only after the hold time.
	frr := strings.NewReplacer( // at each place, the first one that matches
		"router-id 192.0.2.1", "router-id 192.0.2.1\n timers bgp 200 600",
		"swp1 interface remote-as external", "lb1 interface remote-as external\n neighbor lb1 bfd profile balancers",
		"swp", "lb").Replace(block(t, page, "## Unnumbered peers", 1))
	must(t, os.WriteFile(configFile(l, "edge-bgpd.conf"), []byte(frr), 0o644))
	must(t, l.Process("edge", "frr").Stop())
	must(t, l.Process("edge", "frr").Start(t.Context()))
	bgpOf := func(n *lab.Node) *desired.BGP {
		return sectionBGP(t, strings.NewReplacer("eth0", "eth1", "192.0.2.11", n.IPv4.String(),
			"/etc/segue/bgp-password", filepath.Join(dir, n.Name)).Replace(
			block(t, page, "## Unnumbered peers", 0)))
	}
	for i, name := range nodes(l, lab.RoleBalancer) {
		n := l.Node(name)
		must(t, os.WriteFile(filepath.Join(dir, name), fmt.Appendf(nil, "SECRET%d\n", i+1), 0o600))
		cfg := n.BalancerConfig()
		cfg.BGP = bgpOf(n)
		cfg.BGP.Peers[0].HoldTime = 10 * time.Minute
		must(t, n.WriteBalancerConfig(cfg))
		reload(t, l, name)
	}
	for _, s := range l.Topology.Services {
		awaitLinks(t, l, hostRoute(s.VIP), "lb1", "lb2")
		curl(t, l, s, 4)
	}
	peers := bgpStatus(t, l.Node("lb1")).Peers
	if len(peers) != 1 || peers[0].Address != "eth1" || !strings.HasPrefix(peers[0].Neighbor, "fe80::") ||
		!strings.HasPrefix(peers[0].LocalAddress, "fe80::") {
		t.Errorf("peers %+v", peers)
	}
	awaitSessions(t, l.Node("lb2"), 1)
	routes := watchRoutes(t, l)
	restart(t, l.Process("lb1", "lb"))
	awaitSessions(t, l.Node("lb1"), 1)
	if changes, _ := routes.since(0); len(changes) > 0 {
		t.Errorf("a restart changed routes: %v", changes)
	}

	// With the router's address in the configuration.
	n := l.Node("lb2")
	cfg := n.BalancerConfig()
	cfg.BGP = bgpOf(n)
	cfg.BGP.Peers[0].Address = netip.MustParseAddr(bgpStatus(t, n).Peers[0].Neighbor)
	must(t, n.WriteBalancerConfig(cfg))
	reload(t, l, "lb2")
	awaitSessions(t, n, 1)
	if peers := bgpStatus(t, n).Peers; peers[0].Address != cfg.BGP.Peers[0].Name() {
		t.Errorf("peers %+v", peers)
	}
	must(t, l.Process("edge", "frr").Stop())
	must(t, l.Process("edge", "frr").Start(t.Context()))
	for _, s := range l.Topology.Services {
		awaitLinks(t, l, hostRoute(s.VIP), "lb1", "lb2")
	}

	bfd := fmt.Sprintf("router id %s;\n%s", l.Node("lb1").IPv4, strings.NewReplacer(
		"fe80::1", bgpStatus(t, l.Node("lb1")).Peers[0].Neighbor, "eth0", "eth1").Replace(
		block(t, page, "## A dead host", 1)))
	must(t, os.WriteFile(configFile(l, "lb1-bfd.conf"), []byte(bfd), 0o644))
	must(t, l.Process("lb1", "bfd").Stop())
	must(t, l.Process("lb1", "bfd").Start(t.Context()))
	awaitBFD(t, l, "lb1", 1)
	start := time.Now()
	command(t, l, "lb1", "ip", "-6", "rule", "add", "blackhole", "pref", "0") // the host sends nothing any more
	for _, s := range l.Topology.Services {
		awaitLinks(t, l, hostRoute(s.VIP), "lb2")
	}
	t.Logf("the routes of a dead host left after %.1f s", time.Since(start).Seconds())
}

// unnumberedBIRD is TestBGPUnnumbered with BIRD.
func unnumberedBIRD(t *testing.T, page string) {
	topology := routed(t, lab.BIRD, 1)
	topology.TwoArmed = true
	l := up(t, topology)
	file := configFile(l, "edge-bird.conf")
	text, err := os.ReadFile(file)
	must(t, err)
	general, _, _ := strings.Cut(string(text), "\nprotocol bgp ")
	bird := strings.ReplaceAll(block(t, page, "## Unnumbered peers", 2), "swp", "lb")
	// BIRD listens on the port lb1 alone, and the lab waits until it listens on a loopback address.
	const listener = "protocol bgp { local as 64512; neighbor 127.0.0.2 as 64512; passive; ipv4; }\n"
	must(t, os.WriteFile(file, []byte(general+"\n"+bird+listener), 0o644))
	must(t, l.Process("edge", "bird").Stop())
	must(t, l.Process("edge", "bird").Start(t.Context()))
	n := l.Node("lb1")
	password := filepath.Join(t.TempDir(), "password")
	must(t, os.WriteFile(password, []byte("SECRET1\n"), 0o600))
	cfg := n.BalancerConfig()
	cfg.BGP = sectionBGP(t, strings.NewReplacer("eth0", "eth1", "192.0.2.11", n.IPv4.String(),
		"/etc/segue/bgp-password", password).Replace(block(t, page, "## Unnumbered peers", 0)))
	must(t, n.WriteBalancerConfig(cfg))
	reload(t, l, "lb1")
	awaitSessions(t, n, 1)
	for _, s := range l.Topology.Services {
		awaitLinks(t, l, hostRoute(s.VIP), "lb1")
		curl(t, l, s, 4)
	}
}

// TestBGPRoutes: a router takes an aggregate of each family while a service inside can serve, and
// the attributes of services. Each kind of attribute of a drain shifts the traffic of a balancer to
// the others, and its routes stay.
func TestBGPRoutes(t *testing.T) {
	t.Parallel()
	l := up(t, routed(t, lab.FRR, 2))
	six, four := service(t, l, "http6-encap"), service(t, l, "http4-encap")
	aggregate4 := netip.PrefixFrom(four.VIP, 24).Masked()
	aggregate6 := netip.PrefixFrom(six.VIP, 48).Masked()
	acceptAggregates(t, l, aggregate4, aggregate6)
	drain := &desired.RouteAttributes{Prepend: new(uint32(2))}
	configure := func(name string, change func(*desired.Balancer)) {
		t.Helper()
		n := l.Node(name)
		cfg := n.BalancerConfig()
		cfg.BGP.HoldDown, cfg.BGP.Drain = time.Millisecond, drain
		cfg.BGP.Aggregates = []desired.Aggregate{
			{Prefix: aggregate4, RouteAttributes: desired.RouteAttributes{MED: new(uint32(7))}},
			{Prefix: aggregate6, SummaryOnly: true},
		}
		for i := range cfg.Services {
			if s := &cfg.Services[i]; s.VIP == four.VIP {
				s.BGP = &desired.ServiceBGP{RouteAttributes: desired.RouteAttributes{
					Prepend: new(uint32(1)), MED: new(uint32(30)), Communities: []desired.Community{"64600:1"},
				}}
			}
		}
		change(&cfg)
		must(t, n.WriteBalancerConfig(cfg))
		reload(t, l, name)
	}
	unchanged := func(*desired.Balancer) {}
	configure("lb1", unchanged)
	configure("lb2", unchanged)
	awaitPaths(t, l, hostRoute(four.VIP), "64600 64600, MED 30, 64600:1", "64600 64600, MED 30, 64600:1")
	awaitPaths(t, l, aggregate4, "64600, MED 7", "64600, MED 7")
	awaitPaths(t, l, aggregate6, "64600", "64600")
	awaitPaths(t, l, hostRoute(six.VIP)) // none: the aggregate is a summary
	curl(t, l, six, 4)

	for _, kind := range []desired.RouteAttributes{
		{Prepend: new(uint32(2))}, {MED: new(uint32(100))}, {Communities: []desired.Community{"graceful-shutdown"}},
	} {
		*drain = kind
		configure("lb1", unchanged)
		out := command(t, l, "lb1", segue, "drain", "--self", "--wait=false")
		if out != "the balancer is drained: 3 routes less preferred\n" {
			t.Error(out)
		}
		for _, prefix := range []netip.Prefix{hostRoute(four.VIP), aggregate4, aggregate6} {
			awaitGateways(t, l, prefix, "lb2")
			if n := len(pathsOf(t, l, prefix)); n != 2 {
				t.Errorf("%s: %d paths during a drain", prefix, n)
			}
		}
		curl(t, l, four, 4)
		command(t, l, "lb1", segue, "undrain", "--self")
		awaitGateways(t, l, aggregate4, "lb1", "lb2")
	}

	// A drained balancer still gets the traffic if all others have gone. When it stops, its routes
	// go at once.
	command(t, l, "lb1", segue, "drain", "--self", "--wait=false")
	awaitGateways(t, l, aggregate6, "lb2")
	configure("lb2", func(cfg *desired.Balancer) {
		for i := range cfg.Services {
			if s := &cfg.Services[i]; s.VIP == six.VIP {
				for j := range s.Servers {
					s.Servers[j].Drained = true
				}
			}
		}
	})
	awaitGateways(t, l, aggregate6, "lb1")
	awaitGateways(t, l, aggregate4, "lb2") // its service can serve
	curl(t, l, six, 4)
	must(t, l.Process("lb1", "lb").Stop())
	awaitGateways(t, l, aggregate6)
}

// acceptAggregates makes the edge router accept routes to further prefixes.
func acceptAggregates(t *testing.T, l *lab.Lab, prefixes ...netip.Prefix) {
	t.Helper()
	file := configFile(l, "edge-bgpd.conf")
	text, err := os.ReadFile(file)
	must(t, err)
	for _, prefix := range prefixes {
		kind := "ip"
		if prefix.Addr().Is6() {
			kind = "ipv6"
		}
		text = fmt.Appendf(text, "\n%s prefix-list vips permit %s\n", kind, prefix)
	}
	must(t, os.WriteFile(file, text, 0o644))
	must(t, l.Process("edge", "frr").Stop())
	must(t, l.Process("edge", "frr").Start(t.Context()))
}

// awaitGateways waits until the edge router sends packets for a prefix to exactly the balancers.
func awaitGateways(t *testing.T, l *lab.Lab, prefix netip.Prefix, want ...string) {
	t.Helper()
	names := map[string]string{}
	for _, name := range nodes(l, lab.RoleBalancer) {
		names[l.Node(name).IPv4.String()], names[l.Node(name).IPv6.String()] = name, name
	}
	awaitHops(t, l, prefix, want, func(h viaHop) string { return names[h.Gateway] })
}

// awaitPaths waits until BGP of the edge router has these paths to a prefix, in the form of path.
func awaitPaths(t *testing.T, l *lab.Lab, prefix netip.Prefix, want ...string) {
	t.Helper()
	eventually(t, func() error {
		if got := pathsOf(t, l, prefix); !slices.Equal(got, want) {
			return fmt.Errorf("%s: paths %q, want %q", prefix, got, want)
		}
		return nil
	})
}

// pathsOf returns the paths to a prefix that BGP of the edge router has.
func pathsOf(t *testing.T, l *lab.Lab, prefix netip.Prefix) (all []string) {
	t.Helper()
	family := "ipv4"
	if prefix.Addr().Is6() {
		family = "ipv6"
	}
	var table struct {
		Paths []struct {
			ASPath    struct{ String string }
			Metric    *uint32
			Community struct{ String string }
		}
	}
	out := command(t, l, "edge", "vtysh", "--vty_socket", filepath.Join("/run/segue/lab", l.Name, "edge"),
		"-d", "bgpd", "-c", "show bgp "+family+" unicast "+prefix.String()+" json")
	if strings.TrimSpace(out) == "" {
		return nil
	}
	must(t, json.Unmarshal([]byte(out), &table))
	for _, p := range table.Paths {
		path := p.ASPath.String
		if p.Metric != nil && *p.Metric > 0 {
			path += fmt.Sprintf(", MED %d", *p.Metric)
		}
		if p.Community.String != "" {
			path += ", " + p.Community.String
		}
		all = append(all, path)
	}
	slices.Sort(all)
	return all
}

// block returns a code block, counted from 0, after a headline of a page.
func block(t *testing.T, page, headline string, number int) string {
	t.Helper()
	_, text, found := strings.Cut(page, "\n"+headline+"\n")
	text, _, _ = strings.Cut(text, "\n#")
	var blocks []string
	isInside := false
	for line := range strings.Lines(text) {
		content, isCode := strings.CutPrefix(line, "    ")
		if isCode && !isInside {
			blocks = append(blocks, "")
		}
		if isInside = isCode; isCode {
			blocks[len(blocks)-1] += content
		}
	}
	if !found || number >= len(blocks) {
		t.Fatalf("the page has no code block %d below %q", number, headline)
	}
	return blocks[number]
}
