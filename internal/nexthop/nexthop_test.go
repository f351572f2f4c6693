// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/testhost"
)

// patience is the time to wait for the kernel to resolve a neighbour. It is long, because the
// machine may be busy or stand still for a while.
const patience = 60 * time.Second

// server is an address that is routed via link addresses, like a SID.
var server = netip.MustParseAddr("fd00:5:0:1:5::")

// network is a balancer with two neighbours, and the resolver under test.
type network struct {
	t                 *testing.T
	balancer          *testhost.Namespace
	left, right       *testhost.Namespace
	resolver          *Resolver
	ifLeft, ifRight   Link
	macLeft, macRight [6]byte
	cancel            context.CancelFunc
	done              chan struct{} // closed when the resolver has ended
	logged            chan string
	mtu               int // number of changes of the loopback interface's MTU
}

func start(t *testing.T) *network {
	return startWith(t, func(*network) {})
}

// startLeft starts the resolver, and waits until the server's next hop is the left neighbour.
func startLeft(t *testing.T) *network {
	n := start(t)
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.await(server, n.hopLeft())
	return n
}

// startWith calls a function to prepare the resolver before it starts.
func startWith(t *testing.T, prepare func(*network)) *network {
	n := &network{t: t, balancer: testhost.NewNamespace(t), left: testhost.NewNamespace(t), right: testhost.NewNamespace(t)}
	for _, ns := range []*testhost.Namespace{n.balancer, n.left, n.right} {
		// Duplicate address detection takes two seconds.
		sysctl(t, ns, "ipv6/conf/default/accept_dad", "0")
	}
	testhost.Connect(t, n.balancer, "left", testhost.Prefixes("fd00:a::1/64", "10.1.0.1/24"),
		n.left, "eth0", testhost.Prefixes("fd00:a::2/64", "10.1.0.2/24"))
	testhost.Connect(t, n.balancer, "right", testhost.Prefixes("fd00:b::1/64", "10.2.0.1/24"),
		n.right, "eth0", testhost.Prefixes("fd00:b::2/64", "10.2.0.2/24"))
	n.ifLeft = link(t, n.balancer, "left")
	n.ifRight = link(t, n.balancer, "right")
	n.macLeft = link(t, n.left, "eth0").MAC
	n.macRight = link(t, n.right, "eth0").MAC

	n.logged = make(chan string, 100)
	n.resolver = New([]string{"left", "right"}, slog.New(slog.NewTextHandler(lines(n.logged), nil)))
	prepare(n)
	var ctx context.Context
	ctx, n.cancel = context.WithCancel(context.Background())
	n.done = make(chan struct{})
	go func() {
		defer close(n.done)
		if err := n.balancer.Do(func() error { return n.resolver.Run(ctx) }); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(n.stop)
	return n
}

// stop ends the resolver and waits for it.
func (n *network) stop() {
	n.cancel()
	<-n.done
}

// lines is a writer that sends the text of each write to a channel.
type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

func link(t *testing.T, ns *testhost.Namespace, name string) (out Link) {
	t.Helper()
	err := ns.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		out = Link{
			Index: l.Attrs().Index, Name: name, Type: "veth",
			MAC: [6]byte(l.Attrs().HardwareAddr), MTU: l.Attrs().MTU,
		}
		return nil
	})
	testhost.Must(t, err)
	return out
}

// do runs a function in the balancer's namespace.
func (n *network) do(f func() error) {
	n.t.Helper()
	testhost.Must(n.t, n.balancer.Do(f))
}

// routeVia replaces the route to the server's locator.
func (n *network) routeVia(link Link, gateway string) {
	n.t.Helper()
	_, locator, _ := net.ParseCIDR("fd00:5:0:1::/64")
	n.do(func() error {
		return netlink.RouteReplace(&netlink.Route{
			LinkIndex: link.Index, Dst: locator, Gw: net.ParseIP(gateway),
		})
	})
}

// awaitUpdate reads updates until one meets the condition.
func (n *network) awaitUpdate(what string, wanted func(Update) bool) {
	n.t.Helper()
	timeout := time.After(patience)
	var got Update
	for {
		select {
		case got = <-n.resolver.Updates():
			if wanted(got) {
				return
			}
		case <-timeout:
			n.t.Fatalf("%s: last update %v", what, got)
		}
	}
}

// await reads updates until the target's hop is the wanted one.
func (n *network) await(target netip.Addr, want Hop) {
	n.t.Helper()
	n.awaitUpdate(fmt.Sprintf("next hop of %s is to be %v", target, want), func(u Update) bool {
		return u.Hops[target] == want
	})
}

// awaitLost reads updates until the target has no hop.
func (n *network) awaitLost(target netip.Addr) {
	n.t.Helper()
	n.awaitUpdate(fmt.Sprintf("%s is to have no next hop", target), func(u Update) bool {
		_, ok := u.Hops[target]
		return !ok
	})
}

// hopLeft and hopRight return the hops through the neighbours' IPv6 addresses.
func (n *network) hopLeft() Hop {
	return Hop{MAC: n.macLeft, Via: netip.MustParseAddr("fd00:a::2"), Link: n.ifLeft}
}

func (n *network) hopRight() Hop {
	return Hop{MAC: n.macRight, Via: netip.MustParseAddr("fd00:b::2"), Link: n.ifRight}
}

// isManaged reads an entry of the kernel's neighbour tables.
func (n *network) isManaged(link Link, address string) (managed bool) {
	n.t.Helper()
	n.do(func() error {
		all, err := readNeighbours()
		managed = all[neighbour{link.Index, netip.MustParseAddr(address)}].managed
		return err
	})
	return managed
}

func TestFollowsRoutesAndNeighbours(t *testing.T) {
	n := startLeft(t)

	n.routeVia(n.ifRight, "fd00:b::2")
	n.await(server, n.hopRight())

	mac := net.HardwareAddr{2, 0, 0, 0, 0, 9}
	n.do(func() error {
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: n.ifRight.Index, IP: net.ParseIP("fd00:b::2"), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
		})
	})
	want := n.hopRight()
	want.MAC = [6]byte(mac)
	n.await(server, want)
}

func TestOnLinkAddress(t *testing.T) {
	n := start(t)
	address := netip.MustParseAddr("10.2.0.2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{address})
	n.await(address, Hop{MAC: n.macRight, Via: address, Link: n.ifRight})
}

func TestUnreachable(t *testing.T) {
	n := start(t)
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.awaitLost(server)
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.await(server, n.hopLeft())
}

// A neighbour that stops answering keeps its last address. Packets to it would be lost either way,
// and it may be back before the kernel asks again.
func TestFailedNeighbourKeepsAddress(t *testing.T) {
	n := startLeft(t)
	n.do(func() error {
		return netlink.NeighDel(&netlink.Neigh{LinkIndex: n.ifLeft.Index, IP: net.ParseIP("fd00:a::2")})
	})
	// A change elsewhere makes the resolver read the tables again.
	other := netip.MustParseAddr("10.2.0.2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{server, other})
	n.awaitUpdate("the other server is to be resolved", func(u Update) bool {
		if hop := u.Hops[server]; hop.MAC != n.macLeft {
			t.Fatalf("hop after the neighbour entry went: %v", hop)
		}
		_, ok := u.Hops[other]
		return ok
	})
}

// A neighbour that does not answer during a restart of the process keeps the address that the
// earlier process used, on the same interface.
func TestResumesFailedNeighbour(t *testing.T) {
	mac := [6]byte{2, 0, 0, 0, 0, 9}
	other := netip.MustParseAddr("fd00:b::99")
	n := startWith(t, func(n *network) {
		before := Hop{MAC: mac, Link: Link{Index: n.ifLeft.Index}}
		n.resolver.Resume(map[netip.Addr]Hop{server: before, other: before})
	})
	n.routeVia(n.ifLeft, "fd00:a::99") // no host has this address
	n.resolver.SetTargets(t.Context(), []netip.Addr{server, other})
	n.awaitUpdate("one server is where it was, the other was elsewhere", func(u Update) bool {
		want := Hop{MAC: mac, Via: netip.MustParseAddr("fd00:a::99"), Link: n.ifLeft}
		_, ok := u.Hops[other]
		return u.Hops[server] == want && !ok
	})
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.await(server, n.hopLeft())
}

func TestFollowsInterfaces(t *testing.T) {
	n := startLeft(t)
	wanted := func(u Update) bool { return u.Own[0] == n.ifLeft && u.Hops[server] == n.hopLeft() }

	device := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: n.ifLeft.Index}}
	n.ifLeft.MTU = 1400
	n.do(func() error { return netlink.LinkSetMTU(device, n.ifLeft.MTU) })
	n.awaitUpdate("another MTU", wanted)

	n.ifLeft.MAC = [6]byte{2, 0, 0, 0, 0, 9}
	n.do(func() error { return netlink.LinkSetHardwareAddr(device, n.ifLeft.MAC[:]) })
	n.awaitUpdate("another MAC address", wanted)
}

// The resolver follows its own interfaces even if no target is behind them.
func TestFollowsOwnInterfaces(t *testing.T) {
	n := start(t)
	n.resolver.SetTargets(t.Context(), nil)
	wanted := func(u Update) bool { return slices.Equal(u.Own, []Link{n.ifLeft, n.ifRight}) }
	n.awaitUpdate("the interfaces", wanted)

	for i, own := range []*Link{&n.ifLeft, &n.ifRight} {
		device := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: own.Index}}
		own.MAC = [6]byte{2, 0, 0, 0, 0, byte(9 + i)}
		n.do(func() error { return netlink.LinkSetHardwareAddr(device, own.MAC[:]) })
		n.awaitUpdate("another MAC address", wanted)

		n.do(func() error { return netlink.LinkDel(device) })
		*own = Link{}
		n.awaitUpdate("one interface less", wanted)
	}
}

// The resolver follows the addresses of the host, whichever interface has them.
func TestFollowsAddresses(t *testing.T) {
	n := start(t)
	n.resolver.SetTargets(t.Context(), nil)
	has := func(wanted ...string) func(Update) bool {
		return func(u Update) bool {
			for _, address := range wanted {
				if !slices.Contains(u.Addresses, netip.MustParseAddr(address)) {
					return false
				}
			}
			return slices.IsSortedFunc(u.Addresses, netip.Addr.Compare)
		}
	}
	n.awaitUpdate("the addresses", has("127.0.0.1", "::1", "fd00:a::1", "10.1.0.1", "fd00:b::1", "10.2.0.1"))
	device := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: n.ifRight.Index}}
	for _, added := range []string{"192.0.2.7", "2001:db8::7"} {
		address, err := netlink.ParseIPNet(added + "/" + fmt.Sprint(netip.MustParseAddr(added).BitLen()))
		testhost.Must(t, err)
		n.do(func() error { return netlink.AddrAdd(device, &netlink.Addr{IPNet: address}) })
		n.awaitUpdate("one address more", has(added))
		n.do(func() error { return netlink.AddrDel(device, &netlink.Addr{IPNet: address}) })
		n.awaitUpdate("one address less", func(u Update) bool { return !has(added)(u) })
	}
}

// A neighbour that the kernel knew before is kept resolved, too, because its address may be long
// out of date.
func TestManagesKnownNeighbour(t *testing.T) {
	n := start(t)
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.do(func() error { // makes the kernel give up the address soon
		for name, value := range map[string]string{"delay_first_probe_time": "1", "retrans_time_ms": "100"} {
			err := os.WriteFile("/proc/sys/net/ipv6/neigh/left/"+name, []byte(value), 0)
			if err != nil {
				return err
			}
		}
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: n.ifLeft.Index, IP: net.ParseIP("fd00:a::2"),
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}, State: netlink.NUD_STALE,
		})
	})
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.await(server, n.hopLeft())
}

// The resolver does not change entries of an operator.
func TestLeavesPermanentNeighbour(t *testing.T) {
	n := start(t)
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.macLeft = [6]byte{2, 0, 0, 0, 0, 9}
	n.do(func() error {
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: n.ifLeft.Index, IP: net.ParseIP("fd00:a::2"),
			HardwareAddr: n.macLeft[:], State: netlink.NUD_PERMANENT,
		})
	})
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.await(server, n.hopLeft())
	n.do(func() error {
		entries, err := netlink.NeighList(n.ifLeft.Index, netlink.FAMILY_V6)
		for _, e := range entries {
			if e.IP.Equal(net.ParseIP("fd00:a::2")) && e.State != netlink.NUD_PERMANENT {
				t.Errorf("the entry's state became %#x", e.State)
			}
		}
		return err
	})
}

// The addresses of two gateways on the same link are not confused.
func TestAnotherGateway(t *testing.T) {
	n := startLeft(t)
	n.routeVia(n.ifLeft, "fd00:a::99") // no host has this address
	n.awaitLost(server)
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.await(server, n.hopLeft())
}

// manageForOthers makes a neighbour managed, like an operator who wants it to stay managed.
func (n *network) manageForOthers(link Link, address string) {
	n.t.Helper()
	n.do(func() error {
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: link.Index, IP: net.ParseIP(address), Flags: netlink.NTF_USE, FlagsExt: netlink.NTF_EXT_MANAGED,
		})
	})
}

// TestAfterKill starts after a process that was killed and gave back no neighbour. One of its
// neighbours is used again, and one is not.
func TestAfterKill(t *testing.T) {
	n := startWith(t, func(n *network) {
		n.do(func() error {
			return errors.Join(
				setManaged(neighbour{n.ifLeft.Index, netip.MustParseAddr("fd00:a::2")}, true),
				setManaged(neighbour{n.ifRight.Index, netip.MustParseAddr("10.2.0.2")}, true))
		})
		n.manageForOthers(n.ifRight, "fd00:b::2")
	})
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.await(server, n.hopLeft())
	n.stop()
	if n.isManaged(n.ifLeft, "fd00:a::2") || !n.isManaged(n.ifRight, "10.2.0.2") {
		t.Error("the next resolver gave back other neighbours than the one that it used")
	}
	n.do(GiveBack)
	if n.isManaged(n.ifRight, "10.2.0.2") {
		t.Error("the neighbour that no resolver used again is managed for good")
	}
	if !n.isManaged(n.ifRight, "fd00:b::2") {
		t.Error("somebody else's neighbour was given back")
	}
}

func TestGivesNeighboursBack(t *testing.T) {
	n := start(t)
	n.manageForOthers(n.ifRight, "10.2.0.2")
	check := func(when string, left, right bool) {
		t.Helper()
		if n.isManaged(n.ifLeft, "fd00:a::2") != left || n.isManaged(n.ifRight, "fd00:b::2") != right {
			t.Errorf("%s: left is managed: %v, right: %v", when, !left, !right)
		}
		if !n.isManaged(n.ifRight, "10.2.0.2") {
			t.Errorf("%s: somebody else's neighbour is not managed any more", when)
		}
	}
	other := netip.MustParseAddr("10.2.0.2")
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{server, other})
	n.await(server, n.hopLeft())
	check("in use", true, false)

	n.routeVia(n.ifRight, "fd00:b::2")
	n.await(server, n.hopRight())
	check("after a route changed", false, true)

	n.resolver.SetTargets(t.Context(), []netip.Addr{other})
	n.awaitLost(server)
	check("after a target went", false, false)

	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.await(server, n.hopRight())
	check("in use again", false, true)
	n.stop()
	check("after the end", false, false)
}

// An endless series of events does not keep the resolver from its work.
func TestWorksInStorm(t *testing.T) {
	n := start(t)
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.awaitLost(server)
	ctx, calm := context.WithCancel(t.Context())
	raging, ended := make(chan struct{}), make(chan error)
	go func() {
		ended <- n.balancer.Do(func() error { return n.storm(ctx, raging) })
	}()
	<-raging
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.await(server, n.hopLeft())
	calm()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// storm changes a route beside the server's route, much more often than the settle time.
func (n *network) storm(ctx context.Context, raging chan<- struct{}) error {
	tick := time.NewTicker(settle / 10)
	defer tick.Stop()
	_, aggregate, _ := net.ParseCIDR("fd00:5::/32")
	for i := 0; ; i++ {
		err := netlink.RouteReplace(&netlink.Route{
			LinkIndex: n.ifRight.Index, Dst: aggregate, Gw: net.ParseIP(fmt.Sprintf("fd00:b::%x", 2+i%9)),
		})
		if err != nil {
			return err
		}
		if i == 20 {
			close(raging)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// An update contains the reason why a server has no hop.
func TestProblems(t *testing.T) {
	n := start(t)
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.awaitProblem("no route")
	n.routeVia(n.ifLeft, "fd00:a::77") // no host has this address
	n.awaitProblem("fd00:a::77 does not answer on left")
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.awaitUpdate("there is to be no problem", func(u Update) bool {
		return u.Hops[server] == n.hopLeft() && len(u.Problems) == 0
	})
}

// awaitProblem reads updates until the server has no hop and the reason contains the text.
func (n *network) awaitProblem(text string) {
	n.t.Helper()
	n.awaitUpdate("the problem is to be "+text, func(u Update) bool {
		_, ok := u.Hops[server]
		return !ok && strings.Contains(u.Problems[server], text)
	})
}
