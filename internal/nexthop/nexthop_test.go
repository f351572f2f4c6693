package nexthop

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/testnet"
)

// patience bounds the wait for the kernel to resolve a neighbour.
const patience = 10 * time.Second

// server is an address that is routed via link addresses, as a SID is.
var server = netip.MustParseAddr("fd00:5:0:1:5::")

func prefixes(all ...string) (out []netip.Prefix) {
	for _, p := range all {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// network is a balancer with two neighbours, and the resolver under test.
type network struct {
	t                 *testing.T
	balancer          *testnet.Namespace
	left, right       *testnet.Namespace
	resolver          *Resolver
	ifLeft, ifRight   int
	macLeft, macRight [6]byte
}

func start(t *testing.T) *network {
	n := &network{t: t, balancer: testnet.New(t), left: testnet.New(t), right: testnet.New(t)}
	testnet.Connect(t, n.balancer, "left", prefixes("fd00:a::1/64", "10.1.0.1/24"),
		n.left, "eth0", prefixes("fd00:a::2/64", "10.1.0.2/24"))
	testnet.Connect(t, n.balancer, "right", prefixes("fd00:b::1/64", "10.2.0.1/24"),
		n.right, "eth0", prefixes("fd00:b::2/64", "10.2.0.2/24"))
	n.ifLeft, _ = link(t, n.balancer, "left")
	n.ifRight, _ = link(t, n.balancer, "right")
	_, n.macLeft = link(t, n.left, "eth0")
	_, n.macRight = link(t, n.right, "eth0")

	n.resolver = New(slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- n.balancer.Do(func() error { return n.resolver.Run(ctx) })
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return n
}

func link(t *testing.T, ns *testnet.Namespace, name string) (ifindex int, mac [6]byte) {
	t.Helper()
	err := ns.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		ifindex, mac = l.Attrs().Index, [6]byte(l.Attrs().HardwareAddr)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ifindex, mac
}

// routeVia replaces the route to the server's locator.
func (n *network) routeVia(ifindex int, gateway string) {
	n.t.Helper()
	_, locator, _ := net.ParseCIDR("fd00:5:0:1::/64")
	err := n.balancer.Do(func() error {
		return netlink.RouteReplace(&netlink.Route{
			LinkIndex: ifindex, Dst: locator, Gw: net.ParseIP(gateway),
		})
	})
	if err != nil {
		n.t.Fatal(err)
	}
}

// await reads updates until the target's hop is as wanted.
func (n *network) await(target netip.Addr, want Hop) {
	n.t.Helper()
	timeout := time.After(patience)
	var got map[netip.Addr]Hop
	for {
		select {
		case got = <-n.resolver.Updates():
			if hop, ok := got[target]; ok && hop == want {
				return
			}
		case <-timeout:
			n.t.Fatalf("next hop of %s: last update %v, want %v", target, got, want)
		}
	}
}

func TestFollowsRoutesAndNeighbours(t *testing.T) {
	n := start(t)
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.await(server, Hop{MAC: n.macLeft, Ifindex: n.ifLeft})

	n.routeVia(n.ifRight, "fd00:b::2")
	n.await(server, Hop{MAC: n.macRight, Ifindex: n.ifRight})

	mac := net.HardwareAddr{2, 0, 0, 0, 0, 9}
	err := n.balancer.Do(func() error {
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: n.ifRight, IP: net.ParseIP("fd00:b::2"), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	n.await(server, Hop{MAC: [6]byte(mac), Ifindex: n.ifRight})
}

func TestOnLinkAddress(t *testing.T) {
	n := start(t)
	address := netip.MustParseAddr("10.2.0.2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{address})
	n.await(address, Hop{MAC: n.macRight, Ifindex: n.ifRight})
}

func TestUnreachable(t *testing.T) {
	n := start(t)
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	select {
	case got := <-n.resolver.Updates():
		if len(got) != 0 {
			t.Errorf("hops of a server without a route: %v", got)
		}
	case <-time.After(patience):
		t.Error("no answer to new targets that cannot be reached")
	}
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.await(server, Hop{MAC: n.macLeft, Ifindex: n.ifLeft})
}

// A neighbour that stops answering keeps its last address: packets to it would
// be lost either way, and it may be back before the kernel asks again.
func TestFailedNeighbourKeepsAddress(t *testing.T) {
	n := start(t)
	n.routeVia(n.ifLeft, "fd00:a::2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{server})
	n.await(server, Hop{MAC: n.macLeft, Ifindex: n.ifLeft})
	err := n.balancer.Do(func() error {
		return netlink.NeighDel(&netlink.Neigh{LinkIndex: n.ifLeft, IP: net.ParseIP("fd00:a::2")})
	})
	if err != nil {
		t.Fatal(err)
	}
	// A change elsewhere makes it read the tables again.
	other := netip.MustParseAddr("10.2.0.2")
	n.resolver.SetTargets(t.Context(), []netip.Addr{server, other})
	timeout := time.After(patience)
	for {
		select {
		case got := <-n.resolver.Updates():
			if hop := got[server]; hop.MAC != n.macLeft {
				t.Fatalf("hop after the neighbour entry went: %v", hop)
			}
			if _, ok := got[other]; ok {
				return
			}
		case <-timeout:
			t.Fatal("the other server was never resolved")
		}
	}
}
