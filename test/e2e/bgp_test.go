// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/bgp"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

var (
	bgpConnections = flag.Int("bgp.connections", 150, "how many connections TestBalancersComeAndGo keeps open")
	bgpArrivals    = flag.Int("bgp.arrivals", 25, "how many connections per second TestBalancersComeAndGo opens")
)

// bgpThink is the time between two requests on each of the connections.
const bgpThink = 2 * time.Second

// late is the time after which a new connection counts as one that suffered. TCP sends a lost SYN
// again after a second.
const late = 900 * time.Millisecond

// routed returns a lab whose edge router runs the software, with a VIP of each family.
func routed(t *testing.T, router lab.Router, balancers int) lab.Topology {
	t.Helper()
	if router == lab.FRR {
		testhost.NeedCommand(t, "/usr/lib/frr/bgpd", "frr")
	} else {
		testhost.NeedCommand(t, "bird", "bird2")
	}
	topology := topology("http6-encap", "http4-encap")
	topology.Balancers, topology.Edge.Router = balancers, router
	return topology
}

// awaitNextHops waits until the edge router sends packets for all VIPs to exactly the balancers.
func awaitNextHops(t *testing.T, l *lab.Lab, want ...string) {
	t.Helper()
	eventually(t, func() error {
		hops, err := l.NextHops()
		must(t, err)
		for _, s := range l.Topology.Services {
			if got := hops[s.VIP]; !slices.Equal(got, want) {
				return fmt.Errorf("VIP %s: next hops %v, want %v", s.VIP, got, want)
			}
		}
		return nil
	})
}

// awaitSessions waits until a balancer has all its sessions, and at least so many of each since its
// start.
func awaitSessions(t *testing.T, n *lab.Node, least uint64) {
	t.Helper()
	eventually(t, func() error {
		peers := bgpStatus(t, n).Peers
		if len(peers) == 0 {
			return fmt.Errorf("%s has no peers yet", n.Name)
		}
		for _, p := range peers {
			if !p.IsEstablished() || p.Sessions < least {
				return fmt.Errorf("%s: %+v", n.Name, p)
			}
		}
		return nil
	})
}

// bgpStatus reads a balancer's sessions and routes by `segue status`.
func bgpStatus(t *testing.T, n *lab.Node) *bgp.State {
	t.Helper()
	out, err := n.Run(t.Context(), segue, "status", "--instance", n.Instance(), "--interval", "0s", "--json")
	must(t, err)
	var s struct{ BGP *bgp.State }
	must(t, json.Unmarshal([]byte(out), &s))
	if s.BGP == nil {
		return &bgp.State{Peers: []bgp.Peer{{State: "unknown"}}} // the process begins
	}
	return s.BGP
}

// routeWatch counts the changes of the VIPs' routes in the edge router's kernel.
type routeWatch struct {
	mu      sync.Mutex
	hops    map[netip.Addr]int // the present number of next hops, by VIP
	changes []string
}

func watchRoutes(t *testing.T, l *lab.Lab) *routeWatch {
	t.Helper()
	w := &routeWatch{hops: map[netip.Addr]int{}}
	present, err := l.NextHops()
	must(t, err)
	for _, s := range l.Topology.Services {
		w.hops[s.VIP] = len(present[s.VIP])
	}
	updates, done := make(chan netlink.RouteUpdate, 1000), make(chan struct{})
	must(t, l.Node("edge").Do(func() error { return netlink.RouteSubscribe(updates, done) }))
	var group sync.WaitGroup
	group.Go(func() {
		for u := range updates {
			w.take(u)
		}
	})
	t.Cleanup(func() {
		close(done)
		group.Wait()
	})
	return w
}

func (w *routeWatch) take(u netlink.RouteUpdate) {
	if u.Dst == nil {
		return
	}
	to, _ := netip.AddrFromSlice(u.Dst.IP)
	vip, change, hops := to.Unmap(), "removed", 0
	if u.Type == unix.RTM_NEWROUTE {
		hops = max(1, len(u.MultiPath))
		change = fmt.Sprintf("%d next hops", hops)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	before, isWatched := w.hops[vip]
	if !isWatched || before == hops { // FRR 10 writes a route again that has not changed
		return
	}
	w.hops[vip] = hops
	w.changes = append(w.changes, fmt.Sprintf("%s: %s", vip, change))
}

// since returns the changes after the first ones, and how many there are in total.
func (w *routeWatch) since(first int) (changes []string, total int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.changes[first:]), len(w.changes)
}

// churn is a lab under load whose balancers come and go.
type churn struct {
	t        *testing.T
	lab      *lab.Lab
	live     *load
	arrivals *arrivals
	routes   *routeWatch
	table    []string
}

// during runs an event under load, and some seconds around it. Then no live connection may be
// broken, and each new connection must have been answered. It returns the changes of routes. The
// function returns what to note about the event.
func (c *churn) during(event string, do func() string) (changes []string) {
	c.t.Helper()
	_, seen := c.routes.since(0)
	before := tcpCounts(c.t, c.lab)
	from := time.Now()
	note := do()
	lasted := time.Since(from)
	c.live.rounds(c.t, 1)
	to := time.Now()
	c.live.requireUnbroken(c.t)
	all := c.arrivals.await(c.t, from, to)
	suffered, failed, longest := 0, 0, time.Duration(0)
	for _, a := range all {
		if took := a.ended.Sub(a.began); a.err != nil {
			failed++
			c.t.Errorf("%s: a new connection to %s failed after %v: %v", event, a.service, took, a.err)
		} else if longest = max(longest, took); took > late {
			suffered++
		}
	}
	changes, _ = c.routes.since(seen)
	counts := tcpCounts(c.t, c.lab).since(before)
	c.table = append(c.table, fmt.Sprintf("| %s | %.1f s | %d | 0 of %d | %d | %d of %d, at most %.1f s | %d | %s |",
		event, lasted.Seconds(), len(changes), len(c.live.connections), failed, suffered, len(all),
		longest.Seconds(), counts.lost, note))
	return changes
}

// bgpRouters has one router in make test, because a run takes two minutes, and all in make soak.
var bgpRouters = flag.String("bgp.routers", string(lab.FRR), "routing software that balancers announce VIPs to, with commas")

// TestBalancersComeAndGo kills, upgrades, drains, adds and loses balancers under load, with each
// routing software. No connection breaks.
func TestBalancersComeAndGo(t *testing.T) {
	t.Parallel()
	for router := range strings.SplitSeq(*bgpRouters, ",") {
		t.Run(router, func(t *testing.T) {
			t.Parallel()
			comeAndGo(t, lab.Router(router))
		})
	}
}

func comeAndGo(t *testing.T, router lab.Router) {
	topology := routed(t, router, 3)
	needRoot(t)
	builds := &builds{path: filepath.Join(t.TempDir(), "segue"), all: []string{segue, otherBuild(t)}}
	must(t, builds.install(0))
	l := upWith(t, topology, builds.path)
	c := &churn{
		t: t, lab: l, routes: watchRoutes(t, l),
		live:     openResting(t, l, *bgpConnections, bgpThink, l.Topology.Services...),
		arrivals: startArrivals(t, l, *bgpArrivals, patience),
	}
	awaitNextHops(t, l, "lb1", "lb2", "lb3")
	lb1 := l.Process("lb1", "lb")

	requireUnmoved := func(event string, changes []string) {
		t.Helper()
		for _, change := range changes {
			if !strings.HasSuffix(change, "3 next hops") {
				t.Errorf("%s moved a route: %s", event, change)
			}
		}
	}
	requireUnmoved("nothing", c.during("nothing", func() string {
		c.live.rounds(t, 1)
		return ""
	}))
	requireUnmoved("a kill", c.during("process killed", func() string {
		must(t, lb1.Kill())
		c.live.rounds(t, 1) // without a process
		must(t, lb1.Start(t.Context()))
		awaitSessions(t, l.Node("lb1"), 1)
		return "no process for a round of requests"
	}))
	requireUnmoved("an upgrade", c.during("upgraded", func() string {
		must(t, lb1.Stop())
		must(t, builds.install(1))
		must(t, lb1.Start(t.Context()))
		awaitSessions(t, l.Node("lb1"), 1)
		return "stopped, and another build started"
	}))
	c.during("drained", func() string {
		out := command(t, l, "lb1", segue, "drain", "--self", "--timeout", patience.String())
		awaitNextHops(t, l, "lb2", "lb3")
		if !strings.HasSuffix(out, "no packets arrive any more: the balancer can be stopped\n") {
			t.Error(out)
		}
		must(t, lb1.Stop())
		command(t, l, "lb1", segue, "lb", "detach", l.Node("lb1").Instance())
		return "and stopped, and detached"
	})
	c.during("added", func() string {
		must(t, lb1.Start(t.Context()))
		awaitSessions(t, l.Node("lb1"), 1)
		if state := bgpStatus(t, l.Node("lb1")); state.Drained == nil {
			t.Error("the balancer is no longer drained after a restart")
		}
		command(t, l, "lb1", segue, "undrain", "--self")
		awaitNextHops(t, l, "lb1", "lb2", "lb3")
		return ""
	})
	c.during("host dead", func() string {
		start := time.Now()
		command(t, l, "fabric", "ip", "link", "set", "lb2", "down")
		awaitNextHops(t, l, "lb1", "lb3")
		return fmt.Sprintf("routes left after %.1f s (hold time 9 s)", time.Since(start).Seconds())
	})
	c.during("host back", func() string {
		command(t, l, "fabric", "ip", "link", "set", "lb2", "up")
		awaitNextHops(t, l, "lb1", "lb2", "lb3")
		return ""
	})
	t.Logf("%d connections, %d new ones a second\n| event | time | route changes | broken | failed | suffered | segments lost | |\n%s",
		*bgpConnections, *bgpArrivals, strings.Join(c.table, "\n"))
}

// TestBFD: beside the balancer's process, BFD finds a dead host, and a restart of the process still
// moves no route. The hold time is so long that the routes of the dead host can only leave by BFD.
func TestBFD(t *testing.T) {
	t.Parallel()
	for router := range strings.SplitSeq(*bgpRouters, ",") {
		t.Run(router, func(t *testing.T) {
			t.Parallel()
			testhost.NeedCommand(t, "bird", "bird2")
			topology := routed(t, lab.Router(router), 2)
			topology.Edge.BFD = true
			l := up(t, topology)
			raiseHoldTimes(t, l)
			awaitBFD(t, l, "lb1", 2)
			routes := watchRoutes(t, l)
			restart(t, l.Process("lb1", "lb"))
			awaitSessions(t, l.Node("lb1"), 1)
			if changes, _ := routes.since(0); len(changes) > 0 {
				t.Errorf("a restart changed routes: %v", changes)
			}
			start := time.Now()
			command(t, l, "fabric", "ip", "link", "set", "lb1", "down")
			awaitNextHops(t, l, "lb2")
			t.Logf("the routes of a dead host left after %.1f s", time.Since(start).Seconds())
		})
	}
}

// raiseHoldTimes makes the hold times of all sessions longer than patience. BIRD itself asks for 240
// s, and FRR for that in its file.
func raiseHoldTimes(t *testing.T, l *lab.Lab) {
	t.Helper()
	const longest = 4 * time.Minute
	if patience >= longest {
		t.Fatalf("%v is too long to tell BFD from a hold time of %v", patience, longest)
	}
	if l.Topology.Edge.Router == lab.FRR {
		file := configFile(l, "edge-bgpd.conf")
		text, err := os.ReadFile(file)
		must(t, err)
		text = []byte(strings.Replace(string(text), "\n bgp router-id", "\n timers bgp 80 240\n bgp router-id", 1))
		must(t, os.WriteFile(file, text, 0o644))
		must(t, l.Process("edge", "frr").Stop())
		must(t, l.Process("edge", "frr").Start(t.Context()))
	}
	reconfigure(t, l, func(cfg *desired.Balancer) {
		for i := range cfg.BGP.Peers {
			cfg.BGP.Peers[i].HoldTime = longest
		}
	})
	for _, name := range nodes(l, lab.RoleBalancer) {
		eventually(t, func() error {
			for _, p := range bgpStatus(t, l.Node(name)).Peers {
				if p.HoldTime != longest.Seconds() {
					return fmt.Errorf("%s: %+v", name, p)
				}
			}
			return nil
		})
	}
	awaitNextHops(t, l, nodes(l, lab.RoleBalancer)...)
}

// awaitBFD waits until the process bfd of a balancer has a number of sessions.
func awaitBFD(t *testing.T, l *lab.Lab, balancer string, sessions int) {
	t.Helper()
	eventually(t, func() error {
		out, err := l.Node(balancer).Run(t.Context(), "birdc", "-s",
			filepath.Join("/run/segue/lab", l.Name, "run", balancer+"-bfd.ctl"), "show", "bfd", "sessions")
		if err != nil || strings.Count(out, " Up ") < sessions {
			return fmt.Errorf("error %v: %s", err, out) // the process begins
		}
		return nil
	})
}

// routersKeepRoutes is the default of bgp.restart-time. If routes leave within patience, routers have
// not kept them.
const routersKeepRoutes = 2 * time.Minute

// TestRoutesOfNoDataPath: when a process ends and leaves no data path, routers do not keep its routes.
func TestRoutesOfNoDataPath(t *testing.T) {
	t.Parallel()
	if patience >= routersKeepRoutes {
		t.Fatalf("%v is too long to see that routers do not keep routes", patience)
	}
	for router := range strings.SplitSeq(*bgpRouters, ",") {
		t.Run(router, func(t *testing.T) {
			t.Parallel()
			topology := routed(t, lab.Router(router), 2)
			topology.TwoArmed = true
			l := up(t, topology)
			lb1, lb2 := l.Process("lb1", "lb"), l.Node("lb2")

			// The interface towards the servers is removed. The sessions are on the other one.
			command(t, l, "lb1", "ip", "link", "delete", l.Node("lb1").BalancerConfig().Node.Inside)
			awaitNextHops(t, l, "lb2")
			if log := readLog(t, lb1); !strings.Contains(log, "the data path is gone: bgp peers are told to remove the routes") {
				t.Errorf("the log does not say so:\n%s", log)
			}

			// The BPF file system is private to the process, which is killed.
			must(t, l.Process("lb2", "lb").Stop())
			command(t, l, "lb2", segue, "lb", "detach", lb2.Instance())
			private := startPrivately(t, l, lb2)
			awaitPrivateSessions(t, lb2)
			awaitNextHops(t, l, "lb2")
			must(t, private.Process.Kill())
			awaitNextHops(t, l)
		})
	}
}

// startPrivately starts a balancer as `ip netns exec` does: with a BPF file system of its own.
func startPrivately(t *testing.T, l *lab.Lab, n *lab.Node) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("ip", "netns", "exec", "segue-"+l.Name+"-"+n.Name, segue, "lb", "-c", configFile(l, n.Name+"-balancer.yaml"))
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	must(t, err)
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // may have ended
		_ = cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("%s", text)
		}
	})
	return cmd
}

// awaitPrivateSessions waits until a balancer, which hides its tables, has all its sessions. Their
// peers must not keep routes.
func awaitPrivateSessions(t *testing.T, n *lab.Node) {
	t.Helper()
	eventually(t, func() error {
		state, err := api.NewClient(n.Instance()).Self(t.Context())
		if err != nil {
			return err
		}
		if state.BGP == nil || len(state.BGP.Peers) == 0 {
			return fmt.Errorf("%s has no peers yet", n.Name) // the router keeps the routes of the former process
		}
		for _, p := range state.BGP.Peers {
			if !p.IsEstablished() {
				return fmt.Errorf("%s: %+v", n.Name, p)
			}
			if p.KeepsRoutes {
				t.Errorf("%s: the peer keeps routes: %+v", n.Name, p)
			}
		}
		return nil
	})
}

// TestRoutersOfTheGuide runs the configurations of docs/operate/bgp.md, of router and balancers,
// with the addresses of a lab. The router takes no other routes than those of VIPs, and no session
// of a balancer with the password of another.
func TestRoutersOfTheGuide(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/operate/bgp.md")
	must(t, err)
	for router, file := range map[lab.Router]string{lab.FRR: "edge-bgpd.conf", lab.BIRD: "edge-bird.conf"} {
		t.Run(string(router), func(t *testing.T) {
			t.Parallel()
			l := up(t, routed(t, router, 2))
			guide := guideOf(t, l, string(page))
			section := strings.ToUpper(string(router))
			must(t, os.WriteFile(configFile(l, file), []byte(guide("### "+section)), 0o644))
			must(t, l.Process("edge", string(router)).Stop())
			must(t, l.Process("edge", string(router)).Start(t.Context()))
			text := guide("## Configure Segue")
			dir := t.TempDir()
			setPassword := func(name, password string) {
				must(t, os.WriteFile(filepath.Join(dir, name), []byte(password+"\n"), 0o600))
			}
			bgpOf := func(n *lab.Node) *desired.BGP {
				return sectionBGP(t, strings.NewReplacer(
					"router-id: "+l.Node("lb1").IPv4.String(), "router-id: "+n.IPv4.String(),
					"/etc/segue/bgp-password", filepath.Join(dir, n.Name)).Replace(text))
			}
			for _, name := range nodes(l, lab.RoleBalancer) {
				setPassword(name, "SECRET"+strings.TrimPrefix(name, "lb"))
				n := l.Node(name)
				cfg := n.BalancerConfig()
				cfg.BGP = bgpOf(n)
				must(t, n.WriteBalancerConfig(cfg))
				reload(t, l, name)
			}
			awaitNextHops(t, l, "lb1", "lb2")
			setPassword("lb2", "SECRET1")
			reload(t, l, "lb2")
			awaitNextHops(t, l, "lb1")
			setPassword("lb2", "SECRET2")
			reload(t, l, "lb2")
			awaitNextHops(t, l, "lb1", "lb2")

			// lb1 announces a VIP that the router does not expect, and then its others again.
			n := l.Node("lb1")
			cfg := n.BalancerConfig()
			cfg.BGP = bgpOf(n)
			all := cfg.Services
			stranger := *service4(t, cfg.Services)
			stranger.Name, stranger.VIP = "stranger", netip.MustParseAddr("198.51.100.1")
			cfg.Services = []desired.Service{stranger}
			must(t, n.WriteBalancerConfig(cfg))
			reload(t, l, "lb1")
			awaitNextHops(t, l, "lb2")
			cfg.Services = append(all, stranger)
			must(t, n.WriteBalancerConfig(cfg))
			reload(t, l, "lb1")
			awaitNextHops(t, l, "lb1", "lb2")
			if routes := bgpStatus(t, n).Routes; len(routes) != 3 || !routes[0].Announced {
				t.Errorf("lb1 does not announce the third VIP: %+v", routes)
			}
			if out := command(t, l, "edge", "ip", "route", "show", "198.51.100.1"); out != "" {
				t.Errorf("the router has taken a route that is none of a VIP: %s", out)
			}
		})
	}
}

// service4 returns the service with an IPv4 VIP.
func service4(t *testing.T, services []desired.Service) *desired.Service {
	t.Helper()
	i := slices.IndexFunc(services, func(s desired.Service) bool { return s.VIP.Is4() })
	if i < 0 {
		t.Fatal("no service has an IPv4 VIP")
	}
	return &services[i]
}

// guideOf returns a function that returns the first code block after a headline of
// docs/operate/bgp.md, with the addresses of the lab.
func guideOf(t *testing.T, l *lab.Lab, page string) func(headline string) string {
	t.Helper()
	edge, lb1, lb2 := l.Node("edge"), l.Node("lb1"), l.Node("lb2")
	replace := strings.NewReplacer( // at each place, the first one that matches
		"192.0.2.11", lb1.IPv4.String(), "192.0.2.12", lb2.IPv4.String(), "192.0.2.1", edge.IPv4.String(),
		"2001:db8:0:1::11", lb1.IPv6.String(), "2001:db8:0:1::12", lb2.IPv6.String(),
		"2001:db8:0:1::1", edge.IPv6.String())
	return func(headline string) string {
		_, text, found := strings.Cut(page, "\n"+headline+"\n")
		text, _, _ = strings.Cut(text, "\n#")
		_, text, hasBlock := strings.Cut(text, "\n\n    ")
		if !found || !hasBlock {
			t.Fatalf("docs/operate/bgp.md has no code block below %q", headline)
		}
		var block strings.Builder
		for line := range strings.Lines("    " + text) {
			content, ok := strings.CutPrefix(line, "    ")
			if !ok {
				break
			}
			block.WriteString(content)
		}
		return replace.Replace(block.String())
	}
}

// sectionBGP parses the section bgp of a balancer's file.
func sectionBGP(t *testing.T, section string) *desired.BGP {
	t.Helper()
	b, _, err := config.ParseBalancer([]byte(`node: {interface: eth0, addresses: [192.0.2.10]}
services:
- {name: web, vip: 203.0.113.1, port: 80, protocol: tcp, encapsulation: ipip, servers: [{name: s1, address: 192.0.2.53}]}
` + section))
	must(t, err)
	return b.BGP
}

// TestFirstStartWithoutServers: a balancer without a data path, as after a boot, announces no VIP while
// its servers fail their checks, not even until it knows that. A server that comes back suffices.
func TestFirstStartWithoutServers(t *testing.T) {
	t.Parallel()
	topology := routed(t, lab.BIRD, 1)
	for i := range topology.Services {
		topology.Services[i].Health = &desired.Health{HTTP: &desired.HTTPCheck{Path: "/healthz"}}
	}
	l := up(t, topology)
	n, lb := l.Node("lb1"), l.Process("lb1", "lb")
	awaitNextHops(t, l, "lb1")
	must(t, lb.Stop())
	command(t, l, "lb1", segue, "lb", "detach", n.Instance())
	for _, name := range nodes(l, lab.RoleServer) {
		must(t, l.Process(name, "nginx").Stop())
	}
	before := len(readLog(t, lb))
	must(t, lb.Start(t.Context()))
	eventually(t, func() error {
		routes := bgpStatus(t, n).Routes
		for _, r := range routes {
			if r.Reason != bgp.NotServed {
				return fmt.Errorf("%+v", r)
			}
		}
		if len(routes) == 0 || !strings.Contains(readLog(t, lb)[before:], "health checks") {
			return fmt.Errorf("the checks have not failed; routes: %+v", routes)
		}
		return nil
	})
	awaitNextHops(t, l) // the peer has removed what it kept
	if log := readLog(t, lb)[before:]; strings.Contains(log, `msg="route announced"`) ||
		strings.Count(log, `msg="route is not announced yet`) != len(topology.Services) {
		t.Errorf("a route was announced, or the log does not tell that it waits:\n%s", log)
	}
	must(t, l.Process("s1", "nginx").Start(t.Context()))
	awaitNextHops(t, l, "lb1")
}

// TestVIPsWithoutServers: a VIP is announced while a server is ready, whatever happens to other
// VIPs.
func TestVIPsWithoutServers(t *testing.T) {
	t.Parallel()
	topology := routed(t, lab.BIRD, 1)
	l := up(t, topology)
	six, four := service(t, l, "http6-encap"), service(t, l, "http4-encap")
	n := l.Node("lb1")
	configure := func(change func(*desired.Balancer)) {
		t.Helper()
		cfg := n.BalancerConfig()
		cfg.BGP.HoldDown = time.Millisecond
		change(&cfg)
		must(t, n.WriteBalancerConfig(cfg))
		reload(t, l, "lb1")
	}
	requireRoutes := func(when string, want6, want4 int) {
		t.Helper()
		eventually(t, func() error {
			hops, err := l.NextHops()
			must(t, err)
			if len(hops[six.VIP]) != want6 || len(hops[four.VIP]) != want4 {
				return fmt.Errorf("%s: routes %v", when, hops)
			}
			return nil
		})
	}
	requireRoutes("at first", 1, 1)
	configure(func(cfg *desired.Balancer) {
		for i := range cfg.Services {
			if s := &cfg.Services[i]; s.Name == four.Name {
				for j := range s.Servers {
					s.Servers[j].Drained = true
				}
			}
		}
	})
	requireRoutes("drained servers", 1, 0)
	out := command(t, l, "lb1", segue, "status", "--interval", "0s")
	if want := "NOT ANNOUNCED: 203.0.113.2/32: none of its services can serve: http4-encap"; !strings.Contains(out, want) {
		t.Errorf("status does not say %q:\n%s", want, out)
	}
	if log := readLog(t, l.Process("lb1", "lb")); !strings.Contains(log, "route WITHDRAWN") {
		t.Errorf("the log does not say so:\n%s", log)
	}
	configure(func(*desired.Balancer) {})
	requireRoutes("undrained servers", 1, 1)
	if sessions := bgpStatus(t, n).Peers[0].Sessions; sessions != 1 {
		t.Errorf("reloads have reset a session: it was established %d times", sessions)
	}
	for _, name := range nodes(l, lab.RoleServer) { // no server answers probes
		must(t, l.Process(name, "agent").Stop())
		command(t, l, name, "ip", "link", "set", "eth0", "down")
	}
	requireRoutes("dead servers", 0, 0)
	for _, name := range nodes(l, lab.RoleServer) {
		command(t, l, name, "ip", "link", "set", "eth0", "up")
		must(t, l.Process(name, "agent").Start(t.Context()))
	}
	requireRoutes("servers are back", 1, 1)
}
