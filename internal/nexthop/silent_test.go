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

// version is an IP version, with the addresses that the tests use. The server is behind the left
// neighbour, and a router is on the right.
type version struct {
	flag, family       string
	server             netip.Addr
	locator, aggregate string
	left, right        netip.Addr
}

var versions = []version{
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

// forBothVersions runs a test for IPv6 and for IPv4. The kernel notices soon that a neighbour does
// not answer.
func forBothVersions(t *testing.T, prepare func(*network, version),
	test func(t *testing.T, n *network, v version)) {
	t.Parallel()
	for _, v := range versions {
		t.Run(v.family, func(t *testing.T) {
			t.Parallel()
			n := startWith(t, func(n *network) {
				n.hurry("left", "right")
				prepare(n, v)
			})
			test(t, n, v)
		})
	}
}

func unprepared(*network, version) {}

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
func (n *network) ip(v version, commands ...string) {
	n.t.Helper()
	ip(n.t, n.balancer, v.flag, commands...)
}

// viaLeft and viaRight return the hops through the neighbours.
func (n *network) viaLeft(v version) Hop {
	return Hop{MAC: n.macLeft, Via: v.left, Link: n.ifLeft}
}

func (n *network) viaRight(v version) Hop {
	return Hop{MAC: n.macRight, Via: v.right, Link: n.ifRight}
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
func (n *network) hush(v version, ns *testhost.Namespace, key neighbour) {
	n.t.Helper()
	ip(n.t, ns, v.flag, fmt.Sprintf("addr del %s dev eth0", v.addressOf(key)))
	n.awaitFailure(key, func() { n.do(func() error { return setManaged(key, true) }) })
}

// unhush adds the address again, and makes the kernel ask for the neighbour at once. By itself the
// kernel would ask after at most 5 seconds.
func (n *network) unhush(v version, ns *testhost.Namespace, key neighbour) {
	n.t.Helper()
	nodad := map[string]string{"ipv6": "nodad"}[v.family]
	ip(n.t, ns, v.flag, fmt.Sprintf("addr add %s dev eth0 %s", v.addressOf(key), nodad))
	n.do(func() error { return setManaged(key, true) })
}

// addressOf returns the configured address of a neighbour.
func (v version) addressOf(key neighbour) string {
	return fmt.Sprintf("%s/%d", key.address, map[string]int{"ipv6": 64, "ipv4": 24}[v.family])
}

// toLeft and toRight return the keys of the neighbours.
func (n *network) toLeft(v version) neighbour  { return neighbour{n.ifLeft.Index, v.left} }
func (n *network) toRight(v version) neighbour { return neighbour{n.ifRight.Index, v.right} }

// awaitFailure calls meanwhile again and again until the kernel has given up on a neighbour.
func (n *network) awaitFailure(key neighbour, meanwhile func()) {
	n.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		var now entry
		n.do(func() error {
			all, err := readNeighbours()
			now = all[key]
			return err
		})
		if now.failed {
			return
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("the kernel does not give up on %v: %+v", key, now)
		}
		meanwhile()
	}
}

// askAgain makes the kernel ask for the left neighbour once more. The neighbour does not answer,
// and the hop of the server must stay the same.
func (n *network) askAgain(v version, want Hop) {
	n.t.Helper()
	n.do(func() error { return setManaged(n.toLeft(v), true) })
	n.awaitFailure(n.toLeft(v), func() {
		select {
		case u := <-n.resolver.Updates():
			if got := u.Hops[v.server]; got != want {
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
	forBothVersions(t, unprepared, func(t *testing.T, n *network, v version) {
		n.ip(v, fmt.Sprintf("route add default via %s", v.right),
			fmt.Sprintf("route add %s via %s", v.locator, v.left))
		n.resolver.SetTargets(t.Context(), []netip.Addr{v.server})
		n.await(v.server, n.viaLeft(v))

		n.hush(v, n.left, n.toLeft(v))
		n.await(v.server, n.viaLeft(v).silent())
		for range 2 {
			n.askAgain(v, n.viaLeft(v).silent())
		}
		// A change that makes the resolver read the tables does not change the hop.
		n.ip(v, fmt.Sprintf("route add %s via %s", v.aggregate, v.right))
		n.askAgain(v, n.viaLeft(v).silent())

		n.unhush(v, n.left, n.toLeft(v))
		n.await(v.server, n.viaLeft(v))
	})
}

// TestSilentFromTheStart has a neighbour that did not answer before the resolver starts.
func TestSilentFromTheStart(t *testing.T) {
	forBothVersions(t, func(n *network, v version) {
		n.ip(v, fmt.Sprintf("route add default via %s", v.right),
			fmt.Sprintf("route add %s via %s", v.locator, v.left))
		n.hush(v, n.left, n.toLeft(v))
	}, func(t *testing.T, n *network, v version) {
		n.resolver.SetTargets(t.Context(), []netip.Addr{v.server})
		n.awaitLost(v.server)
		n.askAgain(v, Hop{})
		n.unhush(v, n.left, n.toLeft(v))
		n.await(v.server, n.viaLeft(v))
	})
}

// TestWithdrawnRoute removes a server's own route while there is a default route. Only servers
// that never had their own route use the default route.
func TestWithdrawnRoute(t *testing.T) {
	forBothVersions(t, unprepared, func(t *testing.T, n *network, v version) {
		n.ip(v, fmt.Sprintf("route add default via %s", v.right))
		targets := []netip.Addr{v.server}
		n.resolver.SetTargets(t.Context(), targets)
		n.await(v.server, n.viaRight(v).byDefault())

		n.ip(v, fmt.Sprintf("route add %s via %s", v.locator, v.left))
		n.await(v.server, n.viaLeft(v))
		n.ip(v, fmt.Sprintf("route del %s", v.locator))
		n.awaitUpdate("the own route is withdrawn", func(u Update) bool {
			_, ok := u.Hops[v.server]
			return !ok && strings.Contains(u.Problems[v.server], "default route")
		})

		n.ip(v, fmt.Sprintf("route add %s via %s", v.aggregate, v.right))
		n.await(v.server, n.viaRight(v))
		n.ip(v, fmt.Sprintf("route del %s", v.aggregate))
		n.awaitLost(v.server)

		// A server that was removed and is added again counts as a new one.
		n.resolver.SetTargets(t.Context(), nil)
		n.resolver.SetTargets(t.Context(), targets)
		n.await(v.server, n.viaRight(v).byDefault())
	})
}

// TestResumesOwnRoute starts after an earlier process. One of its servers had lost its own route,
// and another one was reached by the default route.
func TestResumesOwnRoute(t *testing.T) {
	other := map[string]netip.Addr{
		"ipv6": netip.MustParseAddr("fd00:5:0:2:5::"), "ipv4": netip.MustParseAddr("10.5.2.9"),
	}
	forBothVersions(t, func(n *network, v version) {
		n.ip(v, fmt.Sprintf("route add default via %s", v.right))
		n.resolver.Resume(map[netip.Addr]Hop{v.server: {}, other[v.family]: {Default: true}})
	}, func(t *testing.T, n *network, v version) {
		n.resolver.SetTargets(t.Context(), []netip.Addr{v.server, other[v.family]})
		n.awaitUpdate("one server by the default route, the other not", func(u Update) bool {
			_, reached := u.Hops[v.server]
			if reached {
				t.Fatalf("the server is reached by %v", u.Hops[v.server])
			}
			return u.Hops[other[v.family]] == n.viaRight(v).byDefault()
		})
		n.ip(v, fmt.Sprintf("route add %s via %s", v.locator, v.left))
		n.await(v.server, n.viaLeft(v))
	})
}

// TestResumesSilence starts after an earlier process for which the neighbour was silent, or was
// not. An entry that nobody keeps resolved fails at some time. So a failed entry proves nothing.
func TestResumesSilence(t *testing.T) {
	for name, was := range map[string]func(Hop) Hop{
		"silent": Hop.silent, "answered": func(h Hop) Hop { return h },
	} {
		t.Run(name, func(t *testing.T) {
			forBothVersions(t, func(n *network, v version) {
				n.hush(v, n.left, n.toLeft(v))
				n.do(func() error { return setManaged(n.toLeft(v), false) })
				n.awaitFailure(n.toLeft(v), func() {})
				n.ip(v, fmt.Sprintf("route add %s via %s", v.locator, v.left))
				before := was(Hop{MAC: n.macLeft, Link: Link{Index: n.ifLeft.Index}})
				n.resolver.Resume(map[netip.Addr]Hop{v.server: before})
			}, func(t *testing.T, n *network, v version) {
				n.resolver.SetTargets(t.Context(), []netip.Addr{v.server})
				first := true
				n.awaitUpdate("the hop of the process before, and soon silent", func(u Update) bool {
					if got := u.Hops[v.server]; first && got != was(n.viaLeft(v)) {
						t.Fatalf("the first hop is %v", got)
					}
					first = false
					return u.Hops[v.server] == n.viaLeft(v).silent()
				})
				n.unhush(v, n.left, n.toLeft(v))
				n.await(v.server, n.viaLeft(v))
			})
		})
	}
}

// TestResumesLess starts after an earlier process that knew another address of a neighbour than
// the kernel does now. Two servers are behind the neighbour.
func TestResumesLess(t *testing.T) {
	forBothVersions(t, func(n *network, v version) {
		n.ip(v, fmt.Sprintf("route add %s via %s", v.locator, v.left),
			fmt.Sprintf("neigh replace %s lladdr %s dev left", v.left, net.HardwareAddr(n.macLeft[:])))
		before := Hop{MAC: [6]byte{2, 0, 0, 0, 0, 9}, Link: Link{Index: n.ifLeft.Index}, Silent: true}
		n.resolver.Resume(map[netip.Addr]Hop{v.server: before, v.server.Next(): before})
	}, func(t *testing.T, n *network, v version) {
		n.resolver.SetTargets(t.Context(), []netip.Addr{v.server, v.server.Next()})
		n.awaitUpdate("the hops", func(u Update) bool {
			for target, got := range u.Hops {
				if got != n.viaLeft(v) {
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
		down, up func(t *testing.T, n *network, v version)
		want     func(Hop) Hop
	}{
		"administratively": {
			down: func(t *testing.T, n *network, v version) { n.ip(v, "link set left down") },
			want: func(Hop) Hop { return Hop{} },
		},
		"no carrier": {
			down: func(t *testing.T, n *network, v version) { ip(t, n.left, v.flag, "link set eth0 down") },
			want: Hop.silent,
		},
		"no carrier, which is heeded": {
			down: func(t *testing.T, n *network, v version) {
				sysctl(t, n.balancer, v.family+"/conf/left/ignore_routes_with_linkdown", "1")
				ip(t, n.left, v.flag, "link set eth0 down")
			},
			want: func(Hop) Hop { return Hop{} },
		},
	} {
		t.Run(name, func(t *testing.T) {
			forBothVersions(t, unprepared, func(t *testing.T, n *network, v version) {
				n.ip(v, fmt.Sprintf("route add default via %s", v.right),
					fmt.Sprintf("route add %s via %s", v.locator, v.left))
				n.resolver.SetTargets(t.Context(), []netip.Addr{v.server})
				n.await(v.server, n.viaLeft(v))
				c.down(t, n, v)
				n.awaitUpdate("the hop", func(u Update) bool {
					got := u.Hops[v.server]
					if got.Link.Index == n.ifRight.Index {
						t.Fatalf("the hop is %v", got)
					}
					return got == c.want(n.viaLeft(v))
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
			forBothVersions(t, func(n *network, v version) {
				n.ip(v, fmt.Sprintf("nexthop add id 1 via %s dev left", v.left),
					fmt.Sprintf("nexthop add id 2 via %s dev right", v.right))
				ip(n.t, n.balancer, "", "nexthop add id 3 group 1,9/2,1")
				if name == "object" {
					sysctl(n.t, n.balancer, "ipv4/nexthop_compat_mode", "0")
				}
				words := strings.NewReplacer("LOCATOR", v.locator,
					"LEFT", v.left.String(), "RIGHT", v.right.String())
				for _, route := range routes {
					n.ip(v, words.Replace(route))
				}
			}, func(t *testing.T, n *network, v version) {
				n.resolver.SetTargets(t.Context(), []netip.Addr{v.server})
				n.await(v.server, n.viaLeft(v))
				n.hush(v, n.left, n.toLeft(v))
				n.await(v.server, n.viaRight(v))
				n.askAgain(v, n.viaRight(v))
				n.hush(v, n.right, n.toRight(v))
				n.await(v.server, n.viaLeft(v).silent())
				n.unhush(v, n.left, n.toLeft(v))
				n.await(v.server, n.viaLeft(v))
			})
		})
	}
}
