// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
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
	*HostPath
	eth0 netlink.Link
}

// in runs a test in a namespace with the interface.
func in(t *testing.T, test func(*host)) { inWith(t, testhost.NewNamespace(t), test) }

// inWith is in with a namespace at the other end of the interface.
func inWith(t *testing.T, peer *testhost.Namespace, test func(*host)) {
	ns := testhost.NewNamespace(t)
	testhost.Connect(t, ns, "eth0", testhost.Prefixes("10.0.0.1/24", "2001:db8:0:1::1/64"), peer, "eth0",
		testhost.Prefixes("10.0.0.2/24", "2001:db8:0:1::2/64"))
	err := ns.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		h := &host{t, NewHostPath(mark, mask), link}
		h.must(err)
		h.set()
		test(h)
		return nil
	})
	testhost.Must(t, err)
}

func (h *host) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

// set sets the path, and makes it choose sources anew.
func (h *host) set(wanted ...netip.Addr) {
	by := PathInterface{Name: "eth0", Index: h.eth0.Attrs().Index, MTU: h.eth0.Attrs().MTU}
	h.must(h.Set(by, vips, wanted))
}

func (h *host) requireSource(vip netip.Addr, want string) {
	h.Helper()
	socket, err := h.Socket(vip)
	if err != nil || socket.Source.String() != want || socket.Device != "eth0" {
		h.Errorf("to %s: from %s by %q, %v; want %s", vip, socket.Source, socket.Device, err, want)
	}
}

// requireRoute requires that marked packets to a VIP leave through the interface.
func (h *host) requireRoute(vip netip.Addr) {
	h.Helper()
	routes, err := netlink.RouteGetWithOptions(vip.AsSlice(), &netlink.RouteGetOptions{Mark: mark | 7, Oif: "eth0"})
	h.must(err)
	want := ipv6.gateway
	if vip.Is4() {
		want = ipv4.gateway
	}
	if len(routes) != 1 || routes[0].LinkIndex != h.eth0.Attrs().Index || !routes[0].Gw.Equal(want) {
		h.Errorf("the route to %s is %v", vip, routes)
	}
}

func (h *host) addTo(name, prefix string) {
	h.Helper()
	link, err := netlink.LinkByName(name)
	h.must(err)
	address, err := netlink.ParseAddr(prefix)
	h.must(err)
	address.Flags = unix.IFA_F_NODAD
	h.must(netlink.AddrReplace(link, address))
}

func TestPath(t *testing.T) {
	in(t, func(h *host) {
		h.requireSource(vips[0], "10.0.0.1")
		h.requireSource(vips[2], "2001:db8:0:1::1")
		h.requireRoute(vips[0])
		h.requireRoute(vips[2])

		// The kernel removes routes and neighbours of an interface that goes down.
		h.must(netlink.LinkSetDown(h.eth0))
		h.must(netlink.LinkSetUp(h.eth0))
		h.addTo("eth0", "2001:db8:0:1::1/64")
		h.set()
		h.requireSource(vips[0], "10.0.0.1")
		h.requireSource(vips[2], "2001:db8:0:1::1")
		h.requireRoute(vips[0])
		h.requireRoute(vips[2])

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
		h.requireRoute(vips[2]) // although the host has the VIP
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
// Checks of other VIPs go on.
func TestOwnIPv4VIP(t *testing.T) {
	in(t, func(h *host) {
		h.addTo("lo", "192.0.2.81/32")
		h.requireSource(vips[0], "10.0.0.1")
		_, err := h.Socket(vips[1])
		if err == nil || !strings.Contains(err.Error(), "the VIP 192.0.2.81 is an address of this host: set the "+
			"sysctl net.ipv4.conf.eth0.accept_local to 1") {
			h.Errorf("without accept_local: %v", err)
		}
		h.setSysctl("eth0/accept_local", "1")
		h.set()
		h.requireSource(vips[1], "10.0.0.1")
		h.requireRoute(vips[1]) // the host has this VIP itself
	})
}

// A check waits only for the findings that it needs itself.
func TestLookupsDelayNoOtherCheck(t *testing.T) {
	in(t, func(h *host) {
		never := func() bool { return false }
		began, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			h.state.refresh(vips[0].String(), never, func() { close(began); <-end })
		}()
		<-began
		h.requireSource(vips[1], "10.0.0.1")
		h.requireSource(vips[2], "2001:db8:0:1::1")
		h.must(h.Recheck(vips[1]))
		h.set()
		h.requireSource(vips[0], "10.0.0.1")
		close(end)
		<-ended
	})
}

// Routes and neighbour entries that exist are not written again: after each written route, every
// process that follows routes reads all of them.
func TestWritesOnlyWhatIsMissing(t *testing.T) {
	in(t, func(h *host) {
		h.requireSource(vips[0], "10.0.0.1")
		h.requireSource(vips[2], "2001:db8:0:1::1")
		routes, neighbours, done := make(chan netlink.RouteUpdate), make(chan netlink.NeighUpdate), make(chan struct{})
		defer close(done)
		h.must(netlink.RouteSubscribe(routes, done))
		h.must(netlink.NeighSubscribe(neighbours, done))
		for is4, s := range h.state.sources {
			s.found = time.Now().Add(-2 * addressLife)
			h.state.sources[is4] = s
		}
		h.requireSource(vips[0], "10.0.0.1")
		h.requireSource(vips[2], "2001:db8:0:1::1")
		if time.Since(h.state.sources[true].found) > addressLife || time.Since(h.state.sources[false].found) > addressLife {
			t.Fatal("the sources were not found again")
		}
		index := h.eth0.Attrs().Index
		for _, f := range []family{ipv4, ipv6} { // the messages about these routes end the search below
			h.must(netlink.RouteAdd(&netlink.Route{
				LinkIndex: index, Family: f.number, Table: 7777, Dst: f.everyone,
			}))
		}
		last := net.ParseIP("2001:db8:0:1::77")
		h.must(netlink.NeighSet(&netlink.Neigh{
			LinkIndex: index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT, IP: last, HardwareAddr: gatewayMAC,
		}))
		for ends := 0; ends < 2; {
			switch update := <-routes; update.Table {
			case 7777:
				ends++
			case firstTable + index:
				t.Errorf("written again: %v", update.Route)
			}
		}
		for update := range neighbours {
			if update.IP.Equal(last) {
				break
			}
			if update.IP.Equal(ipv4.gateway) || update.IP.Equal(ipv6.gateway) {
				t.Errorf("written again: %v", update.Neigh)
			}
		}
	})
}

// setSysctl sets a setting of IPv4 in the namespace of the test.
func (h *host) setSysctl(name, value string) {
	h.Helper()
	h.must(os.WriteFile("/proc/thread-self/root/proc/sys/net/ipv4/conf/"+name, []byte(value), 0))
}

// answerArrives sends a datagram from a VIP in the peer's namespace to a socket of a check, and
// tells whether it arrives.
func (h *host) answerArrives(vip netip.Addr, peer *testhost.Namespace) bool {
	h.Helper()
	var config net.ListenConfig
	config.Control = func(_, _ string, raw syscall.RawConn) error {
		var err error
		return errors.Join(raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), "eth0") }), err)
	}
	conn, err := config.ListenPacket(h.Context(), "udp4", "10.0.0.1:7000")
	h.must(err)
	defer conn.Close()
	h.must(conn.SetReadDeadline(time.Now().Add(time.Second)))
	h.must(peer.Do(func() error {
		from := net.UDPAddrFromAddrPort(netip.AddrPortFrom(vip, 80))
		sender, err := net.DialUDP("udp4", from, &net.UDPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 7000})
		if err != nil {
			return err
		}
		defer sender.Close()
		_, err = sender.Write([]byte("answer"))
		return err
	}))
	_, _, err = conn.ReadFrom(make([]byte, 10))
	return err == nil
}

// The path reports that rp_filter makes the kernel drop answers. The test compares the report with
// what the kernel does.
func TestReversePath(t *testing.T) {
	server := testhost.NewNamespace(t)
	inWith(t, server, func(h *host) {
		h.must(server.Do(func() error {
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			address, err := netlink.ParseAddr(vips[0].String() + "/32")
			return errors.Join(err, netlink.LinkSetUp(lo), netlink.AddrAdd(lo, address))
		}))
		outside := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "outside"}, PeerName: "clients"}
		h.must(netlink.LinkAdd(outside))
		h.must(netlink.LinkSetUp(outside))
		h.addTo("outside", "10.9.0.1/24")
		clients, err := netlink.LinkByName("clients")
		h.must(err)
		h.must(netlink.LinkSetUp(clients))
		through := func(gateways ...string) *netlink.Route {
			_, all, _ := net.ParseCIDR("0.0.0.0/0")
			route := &netlink.Route{Dst: all}
			for _, gateway := range gateways {
				route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: net.ParseIP(gateway)})
			}
			return route
		}
		for _, c := range []struct {
			name    string
			filter  string // of eth0, if it does not name another
			route   *netlink.Route
			want    string // the end of the reason; "": answers arrive
			isLocal bool
		}{
			{"off, no route", "0", nil, "", false},
			{"strict, no route", "1", nil, "because net.ipv4.conf.eth0.rp_filter is 1 and the host has no " +
				"route to the VIP 192.0.2.80: add a route to the VIP, and set the sysctl " +
				"net.ipv4.conf.eth0.rp_filter to 2", false},
			{"loose, no route", "2", nil, "because net.ipv4.conf.eth0.rp_filter is 2 and the host has no " +
				"route to the VIP 192.0.2.80: add a route to the VIP", false},
			{"strict on all, through the other interface", "all 1", through("10.9.0.2"),
				"because net.ipv4.conf.all.rp_filter is 1 and the route to the VIP 192.0.2.80 leads through " +
					"outside: set the sysctl net.ipv4.conf.eth0.rp_filter to 2", false},
			{"strict, through the other interface", "1", through("10.9.0.2"),
				"because net.ipv4.conf.eth0.rp_filter is 1 and the route to the VIP 192.0.2.80 leads through " +
					"outside: set the sysctl net.ipv4.conf.eth0.rp_filter to 2", false},
			{"loose, through the other interface", "2", through("10.9.0.2"), "", false},
			{"off, through the other interface", "0", through("10.9.0.2"), "", false},
			{"strict, through the interface", "1", through("10.0.0.2"), "", false},
			{"strict, through both", "1", through("10.9.0.2", "10.0.0.2"), "", false},
			{"strict, the host has the VIP", "1", nil, "leads through lo: set the sysctl net.ipv4.conf.eth0.rp_filter to 2", true},
			{"loose, the host has the VIP", "2", nil, "", true},
		} {
			scope, value, ok := strings.Cut(c.filter, " ")
			if !ok {
				scope, value = "eth0", c.filter
			}
			h.setSysctl("all/rp_filter", "0")
			h.setSysctl("eth0/rp_filter", "0")
			h.setSysctl(scope+"/rp_filter", value)
			if c.route != nil {
				h.must(netlink.RouteReplace(c.route))
			}
			if c.isLocal {
				h.setSysctl("eth0/accept_local", "1")
				h.addTo("lo", vips[0].String()+"/32")
			}
			h.set()
			_, err := h.Socket(vips[0])
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.HasSuffix(err.Error(), c.want)) {
				t.Errorf("%s: %v, want %q", c.name, err, c.want)
			}
			h.setSysctl(scope+"/rp_filter", "0")
			h.state.answers[vips[0]] = finding{h.state.answers[vips[0]].err, time.Now().Add(-2 * recheckPause)}
			if err := h.Recheck(vips[0]); err != nil {
				t.Errorf("%s: without the filter: %v", c.name, err)
			}
			h.setSysctl(scope+"/rp_filter", value)
			h.state.answers[vips[0]] = finding{h.state.answers[vips[0]].err, time.Now().Add(-2 * recheckPause)}
			if again := h.Recheck(vips[0]); fmt.Sprint(again) != fmt.Sprint(err) {
				t.Errorf("%s: at first %v, and then %v", c.name, err, again)
			}
			if arrives := h.answerArrives(vips[0], server); arrives != (c.want == "") {
				t.Errorf("%s: an answer arrives: %v", c.name, arrives)
			}
			if _, err := h.Socket(vips[2]); err != nil {
				t.Errorf("%s: IPv6: %v", c.name, err)
			}
			if c.route != nil {
				h.must(netlink.RouteDel(c.route))
			}
		}
	})
}

// A process that was killed leaves rules. If its interface is deleted, and made again with the same
// name, the next process removes them. The rules of other interfaces stay, because another instance
// may use them.
func TestRulesOfGoneInterfaces(t *testing.T) {
	in(t, func(h *host) {
		before := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1"}, PeerName: "peer1"}
		h.must(netlink.LinkAdd(before))
		h.must(netlink.LinkSetUp(before))
		h.addTo("eth1", "10.1.0.1/24")
		h.addTo("eth1", "2001:db8:1::1/64")
		killed := NewHostPath(mark, mask)
		h.must(killed.Set(PathInterface{"eth1", before.Attrs().Index, 1500}, vips, nil))
		for _, vip := range []netip.Addr{vips[0], vips[2]} {
			_, err := killed.Socket(vip)
			h.must(err)
			_, err = h.Socket(vip)
			h.must(err)
		}
		h.must(netlink.LinkDel(before))
		again := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1"}, PeerName: "peer1"}
		h.must(netlink.LinkAdd(again))
		h.must(netlink.LinkSetUp(again))
		h.addTo("eth1", "10.1.0.1/24")
		h.addTo("eth1", "2001:db8:1::1/64")
		if again.Attrs().Index == before.Attrs().Index {
			t.Fatal("the new interface has the index of the old one")
		}
		next := NewHostPath(mark, mask)
		h.must(next.Set(PathInterface{"eth1", again.Attrs().Index, 1500}, vips, nil))
		for _, f := range []family{ipv4, ipv6} {
			vip := vips[0]
			if f.number == ipv6.number {
				vip = vips[2]
			}
			_, err := next.Socket(vip)
			h.must(err)
			rules, err := netlink.RuleListFiltered(f.number, &netlink.Rule{Priority: rulePriority}, netlink.RT_FILTER_PRIORITY)
			h.must(err)
			var tables []int
			for _, rule := range rules {
				tables = append(tables, rule.Table-firstTable)
			}
			slices.Sort(tables)
			if want := []int{h.eth0.Attrs().Index, again.Attrs().Index}; !slices.Equal(tables, want) {
				t.Errorf("rules for the interfaces %v, want %v", tables, want)
			}
		}
		h.must(next.Close())
	})
}

func TestUnattached(t *testing.T) {
	if _, err := NewHostPath(mark, mask).Socket(vips[0]); err == nil {
		t.Error("a path without an interface can be used")
	}
	if err := NewHostPath(mark, mask).Close(); err != nil {
		t.Error(err)
	}
}

// A choice is kept for some time, so that it costs little.
func TestSourcesAreKept(t *testing.T) {
	in(t, func(h *host) {
		h.requireSource(vips[0], "10.0.0.1")
		s := h.state.sources[true]
		h.requireSource(vips[1], "10.0.0.1")
		if h.state.sources[true] != s {
			h.Error("chosen twice")
		}
		s.found = time.Now().Add(-2 * addressLife)
		s.address = netip.Addr{}
		h.state.sources[true] = s
		h.requireSource(vips[1], "10.0.0.1")
	})
}
