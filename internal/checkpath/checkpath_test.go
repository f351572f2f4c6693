// SPDX-License-Identifier: Apache-2.0

package checkpath

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testnet"
)

const (
	mark = 0x5e6c0000
	mask = 0xffff0000
)

var vips = []netip.Addr{
	netip.MustParseAddr("192.0.2.80"), netip.MustParseAddr("192.0.2.81"), netip.MustParseAddr("2001:db8:80::1"),
}

// host is a host with a path through its interface eth0.
type host struct {
	*testing.T
	*Path
	eth0 netlink.Link
}

// in runs a test in a namespace with the interface.
func in(t *testing.T, test func(*host)) {
	ns, peer := testnet.New(t), testnet.New(t)
	testnet.Connect(t, ns, "eth0", testnet.Prefixes("10.0.0.1/24", "2001:db8:0:1::1/64"), peer, "eth0",
		testnet.Prefixes("10.0.0.2/24", "2001:db8:0:1::2/64"))
	err := ns.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		h := &host{t, New(mark, mask), link}
		h.must(err)
		h.set()
		test(h)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (h *host) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

// set sets the path, and makes it choose sources anew.
func (h *host) set(wanted ...netip.Addr) {
	by := Interface{Name: "eth0", Index: h.eth0.Attrs().Index, MTU: h.eth0.Attrs().MTU}
	h.Set(by, vips, wanted)
}

func (h *host) requireSource(vip netip.Addr, want string) {
	h.Helper()
	socket, err := h.Socket(vip)
	if err != nil || socket.Source.String() != want || socket.Device != "eth0" {
		h.Errorf("to %s: from %s by %q, %v; want %s", vip, socket.Source, socket.Device, err, want)
	}
}

// requireWay requires that marked packets from the source leave through the interface.
func (h *host) requireWay(vip netip.Addr) {
	h.Helper()
	routes, err := netlink.RouteGetWithOptions(vip.AsSlice(), &netlink.RouteGetOptions{Mark: mark | 7, Oif: "eth0"})
	h.must(err)
	want := ipv6.gateway
	if vip.Is4() {
		want = ipv4.gateway
	}
	if len(routes) != 1 || routes[0].LinkIndex != h.eth0.Attrs().Index || !routes[0].Gw.Equal(want) {
		h.Errorf("the way to %s is %v", vip, routes)
	}
}

func (h *host) addTo(name, prefix string) {
	h.Helper()
	link, err := netlink.LinkByName(name)
	h.must(err)
	address, err := netlink.ParseAddr(prefix)
	h.must(err)
	address.Flags = unix.IFA_F_NODAD
	h.must(netlink.AddrAdd(link, address))
}

func TestPath(t *testing.T) {
	in(t, func(h *host) {
		h.requireSource(vips[0], "10.0.0.1")
		h.requireSource(vips[2], "2001:db8:0:1::1")
		h.requireWay(vips[0])
		h.requireWay(vips[2])

		// The kernel removes routes and neighbours of an interface that goes down.
		h.must(netlink.LinkSetDown(h.eth0))
		h.must(netlink.LinkSetUp(h.eth0))
		h.addTo("eth0", "2001:db8:0:1::1/64")
		h.set()
		h.requireSource(vips[0], "10.0.0.1")
		h.requireSource(vips[2], "2001:db8:0:1::1")
		h.requireWay(vips[0])
		h.requireWay(vips[2])

		h.must(h.Close())
		for _, f := range []family{ipv4, ipv6} {
			rules, err := netlink.RuleListFiltered(f.number, &netlink.Rule{Priority: rulePriority}, netlink.RT_FILTER_PRIORITY)
			h.must(err)
			neighbours, err := netlink.NeighList(h.eth0.Attrs().Index, f.number)
			h.must(err)
			for _, n := range neighbours {
				if n.IP.Equal(f.gateway) {
					h.Errorf("neighbour %v is left", n)
				}
			}
			table := &netlink.Route{Table: firstTable + h.eth0.Attrs().Index}
			routes, err := netlink.RouteListFiltered(f.number, table, netlink.RT_FILTER_TABLE)
			h.must(err)
			if len(rules) > 0 || len(routes) > 0 {
				h.Errorf("left: rules %v, routes %v", rules, routes)
			}
		}
		h.must(h.Close()) // there is nothing to remove
	})
}

// Source addresses are wanted ones, those of the interface, and others, in this order. VIPs are
// never sources.
func TestSources(t *testing.T) {
	in(t, func(h *host) {
		h.addTo("lo", "2001:db8:80::1/128")
		h.addTo("lo", "2001:db8:ffff::1/128")
		h.set()
		h.requireSource(vips[2], "2001:db8:0:1::1")
		h.requireWay(vips[2]) // although the host has the VIP
		h.set(netip.MustParseAddr("2001:db8:ffff::1"), netip.MustParseAddr("2001:db8:ffff::2"))
		h.requireSource(vips[2], "2001:db8:ffff::1")
		address, err := netlink.ParseAddr("2001:db8:0:1::1/64")
		h.must(err)
		h.must(netlink.AddrDel(h.eth0, address))
		h.set()
		h.requireSource(vips[2], "2001:db8:ffff::1")

		addresses, err := netlink.AddrList(h.eth0, unix.AF_INET)
		h.must(err)
		h.must(netlink.AddrDel(h.eth0, &addresses[0]))
		h.set()
		_, err = h.Socket(vips[0])
		if err == nil || !strings.Contains(err.Error(), "has no address") {
			h.Errorf("without an address: %v", err)
		}
	})
}

// The kernel drops answers from an IPv4 VIP that the host has itself, unless it is told not to.
func TestOwnIPv4VIP(t *testing.T) {
	in(t, func(h *host) {
		h.addTo("lo", "192.0.2.81/32")
		_, err := h.Socket(vips[0])
		if err == nil || !strings.Contains(err.Error(), "net.ipv4.conf.eth0.accept_local") {
			h.Errorf("without accept_local: %v", err)
		}
		h.must(os.WriteFile("/proc/thread-self/root/proc/sys/net/ipv4/conf/eth0/accept_local", []byte("1"), 0))
		h.set()
		h.requireSource(vips[0], "10.0.0.1")
		h.requireWay(vips[1]) // the host's own
	})
}

func TestUnattached(t *testing.T) {
	if _, err := New(mark, mask).Socket(vips[0]); err == nil {
		t.Error("a path without an interface can be used")
	}
	if err := New(mark, mask).Close(); err != nil {
		t.Error(err)
	}
}

// A choice is kept for some time, so that it costs little.
func TestSourcesAreKept(t *testing.T) {
	in(t, func(h *host) {
		h.requireSource(vips[0], "10.0.0.1")
		s := h.sources[true]
		h.requireSource(vips[1], "10.0.0.1")
		if h.sources[true] != s {
			h.Error("chosen twice")
		}
		s.found = time.Now().Add(-2 * addressLife)
		s.address = netip.Addr{}
		h.sources[true] = s
		h.requireSource(vips[1], "10.0.0.1")
	})
}
