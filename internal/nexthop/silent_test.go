// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// side is the network of one IP version. The server is behind the left neighbour, and a router is
// on the right.
type side struct {
	flag, family       string
	server             netip.Addr
	locator, aggregate string
	left, right        netip.Addr
}

var sides = []side{
	{
		flag: "-6", family: "ipv6", server: server,
		locator: "fd00:5:0:1::/64", aggregate: "fd00:5::/32",
		left: netip.MustParseAddr("fd00:a::2"), right: netip.MustParseAddr("fd00:b::2"),
	},
	{
		flag: "-4", family: "ipv4", server: netip.MustParseAddr("10.5.1.9"),
		locator: "10.5.1.0/24", aggregate: "10.5.0.0/16",
		left: netip.MustParseAddr("10.1.0.2"), right: netip.MustParseAddr("10.2.0.2"),
	},
}

// onBothSides runs a test for IPv6 and for IPv4. The kernel of its network notices soon that a
// neighbour does not answer.
func onBothSides(t *testing.T, prepare func(*network, side),
	test func(t *testing.T, n *network, s side)) {
	t.Parallel()
	for _, s := range sides {
		t.Run(s.family, func(t *testing.T) {
			t.Parallel()
			n := startWith(t, func(n *network) {
				n.hurry("left", "right")
				prepare(n, s)
			})
			test(t, n, s)
		})
	}
}

func unprepared(*network, side) {}

// hurry makes the kernel trust neighbours on some links for only a second or two.
func (n *network) hurry(links ...string) {
	for _, link := range links {
		for _, family := range []string{"ipv4", "ipv6"} {
			path := fmt.Sprintf("%s/neigh/%s/", family, link)
			sysctl(n.t, n.balancer, path+"base_reachable_time_ms", "500")
			sysctl(n.t, n.balancer, path+"delay_first_probe_time", "0")
			sysctl(n.t, n.balancer, path+"retrans_time_ms", "100")
		}
	}
}

// ip runs commands of ip(8) for one IP version in the balancer's namespace.
func (n *network) ip(s side, commands ...string) {
	n.t.Helper()
	ip(n.t, n.balancer, s.flag, commands...)
}

// viaLeft and viaRight return the hops through the neighbours.
func (n *network) viaLeft(s side) Hop {
	return Hop{MAC: n.macLeft, Via: s.left, Link: n.ifLeft}
}

func (n *network) viaRight(s side) Hop {
	return Hop{MAC: n.macRight, Via: s.right, Link: n.ifRight}
}

func (h Hop) silent() Hop {
	h.Silent = true
	return h
}

func (h Hop) byDefault() Hop {
	h.Default = true
	return h
}

// hush removes the address of a neighbour, and returns when the kernel has given up on the
// neighbour.
func (n *network) hush(s side, ns *testhost.Namespace, way neighbour) {
	n.t.Helper()
	ip(n.t, ns, s.flag, fmt.Sprintf("addr del %s dev eth0", s.addressOf(way)))
	n.awaitFailure(way, func() { n.do(func() error { return setManaged(way, true) }) })
}

// unhush adds the address again, and makes the kernel ask for the neighbour at once. By itself the
// kernel would ask after at most 5 seconds.
func (n *network) unhush(s side, ns *testhost.Namespace, way neighbour) {
	n.t.Helper()
	nodad := map[string]string{"ipv6": "nodad"}[s.family]
	ip(n.t, ns, s.flag, fmt.Sprintf("addr add %s dev eth0 %s", s.addressOf(way), nodad))
	n.do(func() error { return setManaged(way, true) })
}

// addressOf returns the configured address of a neighbour.
func (s side) addressOf(way neighbour) string {
	return fmt.Sprintf("%s/%d", way.address, map[string]int{"ipv6": 64, "ipv4": 24}[s.family])
}

// toLeft and toRight return the keys of the neighbours.
func (n *network) toLeft(s side) neighbour  { return neighbour{n.ifLeft.Index, s.left} }
func (n *network) toRight(s side) neighbour { return neighbour{n.ifRight.Index, s.right} }

// awaitFailure returns when the kernel has given up on a neighbour.
func (n *network) awaitFailure(way neighbour, meanwhile func()) {
	n.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		var now entry
		n.do(func() error {
			all, err := readNeighbours()
			now = all[way]
			return err
		})
		if now.failed {
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("the kernel does not give up on %v: %+v", way, now)
		}
		meanwhile()
	}
}

// askAgain makes the kernel ask for the left neighbour once more. The neighbour does not answer,
// and the hop of the server must stay the same.
func (n *network) askAgain(s side, want Hop) {
	n.t.Helper()
	n.do(func() error { return setManaged(n.toLeft(s), true) })
	n.awaitFailure(n.toLeft(s), func() {
		select {
		case u := <-n.resolver.Updates():
			if got := u.Hops[s.server]; got != want {
				n.t.Fatalf("the hop became %v, want %v", got, want)
			}
		default:
		}
	})
}

// TestSilentNeighbour removes the address of the neighbour of a server's own route. The hop must
// stay the same, although there is a default route to another neighbour, and however often the
// kernel asks.
func TestSilentNeighbour(t *testing.T) {
	onBothSides(t, unprepared, func(t *testing.T, n *network, s side) {
		n.ip(s, fmt.Sprintf("route add default via %s", s.right),
			fmt.Sprintf("route add %s via %s", s.locator, s.left))
		n.resolver.SetTargets(t.Context(), []netip.Addr{s.server})
		n.await(s.server, n.viaLeft(s))

		n.hush(s, n.left, n.toLeft(s))
		n.await(s.server, n.viaLeft(s).silent())
		for range 2 {
			n.askAgain(s, n.viaLeft(s).silent())
		}
		// A change that makes the resolver read the tables does not change the hop.
		n.ip(s, fmt.Sprintf("route add %s via %s", s.aggregate, s.right))
		n.askAgain(s, n.viaLeft(s).silent())

		n.unhush(s, n.left, n.toLeft(s))
		n.await(s.server, n.viaLeft(s))
	})
}

// TestSilentFromTheStart has a neighbour that did not answer before the resolver starts.
func TestSilentFromTheStart(t *testing.T) {
	onBothSides(t, func(n *network, s side) {
		n.ip(s, fmt.Sprintf("route add default via %s", s.right),
			fmt.Sprintf("route add %s via %s", s.locator, s.left))
		n.hush(s, n.left, n.toLeft(s))
	}, func(t *testing.T, n *network, s side) {
		n.resolver.SetTargets(t.Context(), []netip.Addr{s.server})
		n.awaitLost(s.server)
		n.askAgain(s, Hop{})
		n.unhush(s, n.left, n.toLeft(s))
		n.await(s.server, n.viaLeft(s))
	})
}

// TestWithdrawnRoute removes a server's own route while there is a default route. Only servers
// that never had their own route use the default route.
func TestWithdrawnRoute(t *testing.T) {
	onBothSides(t, unprepared, func(t *testing.T, n *network, s side) {
		n.ip(s, fmt.Sprintf("route add default via %s", s.right))
		targets := []netip.Addr{s.server}
		n.resolver.SetTargets(t.Context(), targets)
		n.await(s.server, n.viaRight(s).byDefault())

		n.ip(s, fmt.Sprintf("route add %s via %s", s.locator, s.left))
		n.await(s.server, n.viaLeft(s))
		n.ip(s, fmt.Sprintf("route del %s", s.locator))
		n.awaitUpdate("the own route is withdrawn", func(u Update) bool {
			_, ok := u.Hops[s.server]
			return !ok && strings.Contains(u.Problems[s.server], "default route")
		})

		n.ip(s, fmt.Sprintf("route add %s via %s", s.aggregate, s.right))
		n.await(s.server, n.viaRight(s))
		n.ip(s, fmt.Sprintf("route del %s", s.aggregate))
		n.awaitLost(s.server)

		// A server that was removed and is added again counts as a new one.
		n.resolver.SetTargets(t.Context(), nil)
		n.resolver.SetTargets(t.Context(), targets)
		n.await(s.server, n.viaRight(s).byDefault())
	})
}

// TestResumesOwnRoute starts after an earlier process. One of its servers had lost its own route,
// and another one was reached by the default route.
func TestResumesOwnRoute(t *testing.T) {
	other := map[string]netip.Addr{
		"ipv6": netip.MustParseAddr("fd00:5:0:2:5::"), "ipv4": netip.MustParseAddr("10.5.2.9"),
	}
	onBothSides(t, func(n *network, s side) {
		n.ip(s, fmt.Sprintf("route add default via %s", s.right))
		n.resolver.Resume(map[netip.Addr]Hop{s.server: {}, other[s.family]: {Default: true}})
	}, func(t *testing.T, n *network, s side) {
		n.resolver.SetTargets(t.Context(), []netip.Addr{s.server, other[s.family]})
		n.awaitUpdate("one server by the default route, the other not", func(u Update) bool {
			_, reached := u.Hops[s.server]
			if reached {
				t.Fatalf("the server is reached by %v", u.Hops[s.server])
			}
			return u.Hops[other[s.family]] == n.viaRight(s).byDefault()
		})
		n.ip(s, fmt.Sprintf("route add %s via %s", s.locator, s.left))
		n.await(s.server, n.viaLeft(s))
	})
}

// TestResumesSilence starts after an earlier process for which the neighbour was silent, or was
// not. An entry that nobody kept resolved fails some day. So a failed entry proves nothing.
func TestResumesSilence(t *testing.T) {
	for name, was := range map[string]func(Hop) Hop{
		"silent": Hop.silent, "answered": func(h Hop) Hop { return h },
	} {
		t.Run(name, func(t *testing.T) {
			onBothSides(t, func(n *network, s side) {
				n.hush(s, n.left, n.toLeft(s))
				n.do(func() error { return setManaged(n.toLeft(s), false) })
				n.awaitFailure(n.toLeft(s), func() {})
				n.ip(s, fmt.Sprintf("route add %s via %s", s.locator, s.left))
				before := was(Hop{MAC: n.macLeft, Link: Link{Index: n.ifLeft.Index}})
				n.resolver.Resume(map[netip.Addr]Hop{s.server: before})
			}, func(t *testing.T, n *network, s side) {
				n.resolver.SetTargets(t.Context(), []netip.Addr{s.server})
				first := true
				n.awaitUpdate("the hop of the process before, and soon silent", func(u Update) bool {
					if got := u.Hops[s.server]; first && got != was(n.viaLeft(s)) {
						t.Fatalf("the first hop is %v", got)
					}
					first = false
					return u.Hops[s.server] == n.viaLeft(s).silent()
				})
				n.unhush(s, n.left, n.toLeft(s))
				n.await(s.server, n.viaLeft(s))
			})
		})
	}
}

// TestResumesLess starts after an earlier process that knew another address of a neighbour than
// the kernel does now. Two servers are behind the neighbour.
func TestResumesLess(t *testing.T) {
	onBothSides(t, func(n *network, s side) {
		n.ip(s, fmt.Sprintf("route add %s via %s", s.locator, s.left),
			fmt.Sprintf("neigh replace %s lladdr %s dev left", s.left, net.HardwareAddr(n.macLeft[:])))
		before := Hop{MAC: [6]byte{2, 0, 0, 0, 0, 9}, Link: Link{Index: n.ifLeft.Index}, Silent: true}
		n.resolver.Resume(map[netip.Addr]Hop{s.server: before, s.server.Next(): before})
	}, func(t *testing.T, n *network, s side) {
		n.resolver.SetTargets(t.Context(), []netip.Addr{s.server, s.server.Next()})
		n.awaitUpdate("the hops", func(u Update) bool {
			for target, got := range u.Hops {
				if got != n.viaLeft(s) {
					t.Errorf("the first hop of %s is %v", target, got)
				}
			}
			return len(u.Hops) == 2
		})
	})
}

// TestInterfaceDown sets the interface of a server's own route down, or removes its carrier. The
// kernel then deletes the route, ignores it or keeps it, depending on its settings.
func TestInterfaceDown(t *testing.T) {
	for name, c := range map[string]struct {
		down, up func(t *testing.T, n *network, s side)
		want     func(Hop) Hop
	}{
		"administratively": {
			down: func(t *testing.T, n *network, s side) { n.ip(s, "link set left down") },
			want: func(Hop) Hop { return Hop{} },
		},
		"no carrier": {
			down: func(t *testing.T, n *network, s side) { ip(t, n.left, s.flag, "link set eth0 down") },
			want: Hop.silent,
		},
		"no carrier, which is heeded": {
			down: func(t *testing.T, n *network, s side) {
				sysctl(t, n.balancer, s.family+"/conf/left/ignore_routes_with_linkdown", "1")
				ip(t, n.left, s.flag, "link set eth0 down")
			},
			want: func(Hop) Hop { return Hop{} },
		},
	} {
		t.Run(name, func(t *testing.T) {
			onBothSides(t, unprepared, func(t *testing.T, n *network, s side) {
				n.ip(s, fmt.Sprintf("route add default via %s", s.right),
					fmt.Sprintf("route add %s via %s", s.locator, s.left))
				n.resolver.SetTargets(t.Context(), []netip.Addr{s.server})
				n.await(s.server, n.viaLeft(s))
				c.down(t, n, s)
				n.awaitUpdate("the hop", func(u Update) bool {
					got := u.Hops[s.server]
					if got.Link.Index == n.ifRight.Index {
						t.Fatalf("the hop is %v", got)
					}
					return got == c.want(n.viaLeft(s))
				})
			})
		})
	}
}

// TestSeveralWays has a route with two neighbours: by weights, by metrics, and by a nexthop object
// of which the kernel reports only the number. A silent neighbour is skipped.
func TestSeveralWays(t *testing.T) {
	for name, routes := range map[string][]string{
		"multipath": {"route add LOCATOR nexthop via LEFT weight 9 nexthop via RIGHT"},
		"metrics":   {"route add LOCATOR via LEFT metric 10", "route add LOCATOR via RIGHT metric 20"},
		"object":    {"route add LOCATOR nhid 3"},
	} {
		t.Run(name, func(t *testing.T) {
			onBothSides(t, func(n *network, s side) {
				n.ip(s, fmt.Sprintf("nexthop add id 1 via %s dev left", s.left),
					fmt.Sprintf("nexthop add id 2 via %s dev right", s.right))
				ip(n.t, n.balancer, "", "nexthop add id 3 group 1,9/2,1")
				if name == "object" {
					sysctl(n.t, n.balancer, "ipv4/nexthop_compat_mode", "0")
				}
				words := strings.NewReplacer("LOCATOR", s.locator,
					"LEFT", s.left.String(), "RIGHT", s.right.String())
				for _, route := range routes {
					n.ip(s, words.Replace(route))
				}
			}, func(t *testing.T, n *network, s side) {
				n.resolver.SetTargets(t.Context(), []netip.Addr{s.server})
				n.await(s.server, n.viaLeft(s))
				n.hush(s, n.left, n.toLeft(s))
				n.await(s.server, n.viaRight(s))
				n.askAgain(s, n.viaRight(s))
				n.hush(s, n.right, n.toRight(s))
				n.await(s.server, n.viaLeft(s).silent())
				n.unhush(s, n.left, n.toLeft(s))
				n.await(s.server, n.viaLeft(s))
			})
		})
	}
}
