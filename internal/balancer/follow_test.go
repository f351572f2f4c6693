// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/testhost"
)

// patience is the longest wait for the control loop to apply a change. It does not measure how fast
// the control loop is, because the machine may be busy or stand still for a while.
const patience = 60 * time.Second

// steered is a balancer whose control loop runs. Its server is behind "eth0", which is
// node.interface. It can also have "eth1", which is node.inside.
type steered struct {
	*fixture
	ended chan error // the error with which the control loop has ended
	end   func()     // ends the control loop
}

func steer(t *testing.T) *steered { return steerLate(t, node(), 0) }

// steerInside is steer with two interfaces.
func steerInside(t *testing.T) *steered {
	node := node()
	node.Inside = "eth1"
	return steerLate(t, node, 0)
}

// steerLate is steer with a resolver that starts the given time after the control loop.
func steerLate(t *testing.T, node desired.BalancerNode, late time.Duration) *steered {
	cfg := balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, srv6Server("s1", 1, 1)))
	cfg.Node = node
	s := newSteered(t, cfg)
	s.routeServers(netlink.RouteAdd)
	s.run(late)
	return s
}

// newSteered returns a balancer whose control loop does not run yet, and whose servers have no
// route.
func newSteered(t *testing.T, cfg *desired.Balancer) *steered {
	s := &steered{fixture: open(t, cfg), ended: make(chan error, 1)}
	s.leaveSharedNetwork()
	s.attached = false
	router := testhost.NewNamespace(t)
	testhost.Connect(t, s.ns, "eth0", testhost.Prefixes("fd00:a::1/64"),
		router, "eth0", testhost.Prefixes("fd00:a::2/64"))
	if cfg.Node.Inside != "" {
		testhost.Connect(t, s.ns, cfg.Node.Inside, nil, testhost.NewNamespace(t), "eth0", nil)
	}
	return s
}

// routeServers adds or deletes the route to all servers.
func (s *steered) routeServers(change func(*netlink.Route) error) {
	s.t.Helper()
	s.do("eth0", func(eth0 netlink.Link) error {
		_, locator, _ := net.ParseCIDR("fd00:5::/32")
		return change(&netlink.Route{
			LinkIndex: eth0.Attrs().Index, Dst: locator, Gw: net.ParseIP("fd00:a::2"),
		})
	})
}

// run starts the control loop and, after the time late, the resolver. It waits until the data path
// is attached.
func (s *steered) run(late time.Duration) {
	s.t.Helper()
	// Run cannot be used, because its goroutines would not be in the fixture's namespace.
	ctx, cancel := context.WithCancel(context.Background())
	s.end = cancel
	loops := make(chan struct{}, 4)
	run := func(loop func() error) {
		defer func() { loops <- struct{}{} }()
		if err := s.ns.Do(loop); err != nil {
			s.ended <- err
		}
	}
	go run(func() error { return s.control(ctx) })
	go run(func() error { return s.checker.Run(ctx) })
	go run(func() error { return s.prober.Run(ctx) })
	time.AfterFunc(late, func() { run(func() error { return s.resolver.Run(ctx) }) })
	s.t.Cleanup(func() {
		cancel()
		for range cap(loops) {
			<-loops
		}
	})
	select {
	case <-s.Ready():
	case err := <-s.ended:
		s.t.Fatal(err)
	case <-time.After(patience):
		s.t.Fatal("not attached")
	}
}

// If the machine stands still while next hops are looked up, they do not count as missing.
func TestStartsAfterStandstill(t *testing.T) {
	t.Parallel()
	steerLate(t, node(), resolveTimeout+100*time.Millisecond)
}

func (s *steered) do(name string, change func(netlink.Link) error) {
	s.t.Helper()
	s.must(s.ns.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		return change(link)
	}))
}

// await polls the tables of the data path.
func (s *steered) await(what string, holds func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatal(what)
		}
	}
}

// port returns the port of the server's next hop.
func (s *steered) port() (port dataplane.Port) {
	s.t.Helper()
	number := uint32(atomic.LoadUint64(&s.plane.Directory.Servers[s.slot("web", "s1")].NextHop) >> 48)
	return s.plane.Directory.Ports[number]
}

// hostMACs returns the MAC addresses to which the programs of the interfaces accept frames.
func (s *steered) hostMACs() (macs []uint64) {
	s.t.Helper()
	for _, side := range s.plane.Sides {
		var mac uint64
		s.must(side.Objects.HostMac.Get(&mac))
		macs = append(macs, mac)
	}
	return macs
}

// reload makes the balancer follow another configuration of its service's servers. The router to
// all servers has answered before.
func (s *steered) reload(servers ...desired.Server) {
	s.t.Helper()
	s.await("the router does not answer", func() bool {
		return s.plane.Servers.HasNextHop(s.slot("web", "s1"))
	})
	cfg := balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, servers...))
	cfg.Node = s.cfg.Node
	s.must(s.Reload(context.Background(), cfg, desired.Secrets{}))
}

// A reload looks up the next hop of a server that it adds before it uses the server.
func TestReloadAwaitsNextHops(t *testing.T) {
	t.Parallel()
	s := steer(t)
	s.reload(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))
	if !s.plane.Servers.HasNextHop(s.slot("web", "s2")) {
		t.Error("s2 is in the tables, and has no next hop")
	}
}

// A reload does not fail because a server that it adds has no next hop. The other added servers are
// used at once.
func TestReloadWithoutNextHop(t *testing.T) {
	t.Parallel()
	s := steer(t)
	lost := srv6Server("lost", 9, 1)
	lost.Locator = netip.MustParsePrefix("fd00:9:0:1::/64") // no route leads there
	s.reload(srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), lost)
	for server, want := range map[string]bool{"s1": true, "s2": true, "lost": false} {
		if got := s.plane.Servers.HasNextHop(s.slot("web", server)); got != want {
			t.Errorf("%s has a next hop: %v, want %v", server, got, want)
		}
	}
}

// While a reload waits for the next hop of a server that it adds, the balancer acts on the checks of
// the present servers.
func TestReloadActsOnChecks(t *testing.T) {
	t.Parallel()
	s1, s2, lost := srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("lost", 9, 1)
	// The goroutines of checks are not in the balancer's namespace.
	application, err := net.Listen("tcp", "127.0.0.2:0")
	testhost.Must(t, err)
	address := application.Addr().(*net.TCPAddr).AddrPort()
	other, err := net.Listen("tcp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.3"), address.Port()).String())
	testhost.Must(t, err)
	defer other.Close()
	s1.Host, s2.Host = address.Addr(), netip.MustParseAddr("127.0.0.3")
	lost.Locator = netip.MustParsePrefix("fd00:9:0:1::/64") // no route leads there yet
	web := serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, s1, s2)
	web.Health = &desired.Health{
		Via: desired.ViaHost, TCP: &desired.TCPCheck{Port: address.Port()},
		Interval: 100 * time.Millisecond, Timeout: 100 * time.Millisecond, Rise: 1, Fall: 1,
	}
	cfg := balancerOf(web)
	cfg.Node = node()
	s := newSteered(t, cfg)
	s.patience = patience
	s.routeServers(netlink.RouteAdd)
	s.run(0)

	web.Servers = append(web.Servers, lost)
	next := balancerOf(web)
	waiting, waited := make(chan struct{}), make(chan error, 1)
	go func() {
		waited <- s.call(context.Background(), func(ctx context.Context) error {
			close(waiting)
			s.awaitHops(ctx, next)
			return nil
		})
	}()
	<-waiting
	application.Close()
	s.await("s1 gets new flows, although its check fails", func() bool {
		return !s.plane.Servers.TakesFlows(s.slot("web", "s1"))
	})
	select {
	case <-waited:
		t.Error("the reload does not wait for the next hop of the server that it adds")
	default:
	}
	s.do("eth0", func(eth0 netlink.Link) error {
		_, locator, _ := net.ParseCIDR("fd00:9::/32")
		return netlink.RouteAdd(&netlink.Route{
			LinkIndex: eth0.Attrs().Index, Dst: locator, Gw: net.ParseIP("fd00:a::2"),
		})
	})
	s.must(<-waited)
}

// If the MAC address of the interface changes, the data path accepts frames to the new address and
// sends with it. If the MTU changes, the data path uses the new one.
func TestFollowsInterface(t *testing.T) {
	t.Parallel()
	s := steer(t)
	mac := [6]byte{2, 0, 0, 0, 0, 9}
	s.do("eth0", func(eth0 netlink.Link) error { return netlink.LinkSetHardwareAddr(eth0, mac[:]) })
	s.await("the new MAC address is not taken on", func() bool {
		return s.hostMACs()[0] == wordOf(mac) && slices.Equal(s.port().HardwareAddr(), mac[:])
	})
	s.do("eth0", func(eth0 netlink.Link) error { return netlink.LinkSetMTU(eth0, 1400) })
	s.await("the new MTU is not taken on", func() bool { return s.port().Mtu == 1400 })
}

// The programs of each interface accept frames to the MAC address of that interface, whichever one
// changes.
func TestFollowsBothInterfaces(t *testing.T) {
	t.Parallel()
	s := steerInside(t)
	want := s.hostMACs()
	for i, name := range s.cfg.Node.Interfaces() {
		mac := [6]byte{2, 0, 0, 0, 0, byte(8 + i)}
		s.do(name, func(link netlink.Link) error { return netlink.LinkSetHardwareAddr(link, mac[:]) })
		want[i] = wordOf(mac)
		s.await("the new MAC address of "+name+" is not taken on", func() bool { return slices.Equal(s.hostMACs(), want) })
	}
}

// A balancer does not start if its inside interface does not exist or has no MAC address.
func TestStartsWithBothInterfaces(t *testing.T) {
	t.Parallel()
	cfg := balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, srv6Server("s1", 1, 1)))
	cfg.Node.Interface, cfg.Node.Inside = "out", "eth1"
	f := open(t, cfg)
	f.attached = false
	f.own[0] = f.link("out")
	if err := f.attach(); err == nil || err.Error() != `node.inside "eth1": there is no such interface` {
		t.Errorf("without eth1: %v", err)
	}
	f.own[1] = nexthop.Link{Index: 1, Name: "eth1"}
	if err := f.attach(); err == nil || err.Error() != `node.inside "eth1" has no Ethernet address` {
		t.Errorf("without a MAC address: %v", err)
	}
}

// A balancer ends if one of its interfaces is removed, even if another one with its name is made.
func TestInterfaceGoes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		setting, name string
		again         bool
	}{{"node.interface", "eth0", false}, {"node.interface", "eth0", true}, {"node.inside", "eth1", false}, {"node.inside", "eth1", true}} {
		t.Run(fmt.Sprintf("%s, made anew %v", c.name, c.again), func(t *testing.T) {
			t.Parallel()
			s := steerInside(t)
			s.do(c.name, netlink.LinkDel)
			if c.again {
				far := testhost.NewNamespace(t)
				testhost.Connect(t, s.ns, c.name, nil, far, "eth0", nil)
			}
			select {
			case err := <-s.ended:
				if !strings.Contains(err.Error(), fmt.Sprintf("%s %q is gone", c.setting, c.name)) {
					t.Errorf("it ended with: %v", err)
				}
				waiting, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				if err := s.Reload(waiting, s.cfg, desired.Secrets{}); !errors.Is(err, errEnded) {
					t.Errorf("a reload after the end: error %v", err)
				}
			case <-time.After(patience):
				t.Error("it goes on without its interface")
			}
		})
	}
}

// Native XDP cannot send through a bridge, nor through other interfaces without hardware.
func TestWarnsOfEgress(t *testing.T) {
	t.Parallel()
	f := openStandard(t) // most servers are behind veths, and one is behind a bridge
	var log bytes.Buffer
	f.log = slog.New(slog.NewTextHandler(&log, nil))
	f.mode = datapath.Generic
	f.applyHops()
	if log.Len() != 0 {
		t.Errorf("in generic mode: %s", &log)
	}
	f.mode = datapath.Native
	f.applyHops()
	f.applyHops()
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "interface=bridge type=bridge") {
		t.Errorf("logged:\n%s", got)
	}
}

// The loop makes steps also when nothing happens, and one for each service of a reload. A call that does
// not return makes none.
func TestStepsOfRun(t *testing.T) {
	t.Parallel()
	s := steer(t)
	s.reload(srv6Server("s1", 1, 1))
	for before, n := s.Steps(), 0; n < 2; n++ { // by the sweep at least
		s.await("no step without an event", func() bool { return s.Steps() > before })
		before = s.Steps()
	}
	release, stuck := make(chan struct{}), make(chan uint64)
	ended := make(chan error, 1)
	go func() {
		ended <- s.call(t.Context(), func(context.Context) error {
			stuck <- s.Steps()
			<-release
			return nil
		})
	}()
	at := <-stuck
	time.Sleep(10 * time.Millisecond) // a step now would be wrong
	if got := s.Steps(); got != at {
		t.Errorf("%d steps of a loop that is stuck", got-at)
	}
	close(release)
	s.must(<-ended)
	const many = 50
	cfg := balancerOf()
	for i := range many {
		service := serviceOf(fmt.Sprint("web", i), vip6, desired.Port(1000+i), desired.TCP, desired.SRv6Encap, srv6Server("s1", 1, 1))
		cfg.Services = append(cfg.Services, service)
	}
	cfg.Node = s.cfg.Node
	var during uint64
	s.must(s.call(t.Context(), func(ctx context.Context) error {
		before := s.Steps()
		defer func() { during = s.Steps() - before }()
		return s.Balancer.reload(ctx, cfg, desired.Secrets{}, nil)
	}))
	if during < many {
		t.Errorf("%d steps of a reload with %d services", during, many)
	}
}
