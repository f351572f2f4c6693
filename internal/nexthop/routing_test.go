// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// batch runs commands of ip(8) in a namespace, for a family: "-4", "-6", or "" for none.
func batch(ns *testhost.Namespace, family string, commands ...string) error {
	return ns.Do(func() error {
		ip := exec.Command("ip", append(strings.Fields(family), "-batch", "-")...)
		ip.Stdin = strings.NewReader(strings.Join(commands, "\n"))
		if out, err := ip.CombinedOutput(); err != nil {
			return fmt.Errorf("ip: %w: %s", err, out)
		}
		return nil
	})
}

// ip runs commands like batch, and fails the test if a command fails.
func ip(t testing.TB, ns *testhost.Namespace, family string, commands ...string) {
	t.Helper()
	testhost.Must(t, batch(ns, family, commands...))
}

// sysctl sets a variable, a path under /proc/sys/net, in a namespace.
func sysctl(t *testing.T, ns *testhost.Namespace, path, value string) {
	t.Helper()
	err := ns.Do(func() error { return os.WriteFile("/proc/sys/net/"+path, []byte(value), 0) })
	testhost.Must(t, err)
}

// world has the parts of which random networks of a family are made. Their namespaces have two
// links.
type world struct {
	flag     string // flag of ip(8) for the family
	family   string // name of the family in sysctls
	prefixes []string
	lengths  []int
	random   func(*rand.Rand) netip.Addr
	gateways []string
}

var worlds = map[byte]world{
	unix.AF_INET6: {
		flag: "-6", family: "ipv6",
		prefixes: []string{"fd00:5::", "fd00:5:0:1::", "fd00:5:0:1:5::", "fd00:5:1::"},
		lengths:  []int{32, 48, 62, 64, 80, 128},
		random: func(r *rand.Rand) netip.Addr {
			groups := []any{r.IntN(2), r.IntN(3), r.IntN(2) * 5}
			return netip.MustParseAddr(fmt.Sprintf("fd00:5:%x:%x:%x::", groups...))
		},
		gateways: []string{"fd00:a::2 dev left", "fd00:b::2 dev right", "fd00:b::3 dev right"},
	},
	unix.AF_INET: {
		flag: "-4", family: "ipv4",
		prefixes: []string{"10.5.0.0", "10.5.0.128", "10.5.1.0", "10.5.1.5"},
		lengths:  []int{8, 16, 23, 24, 25, 32},
		random: func(r *rand.Rand) netip.Addr {
			return netip.AddrFrom4([4]byte{10, 5, byte(r.IntN(3)), []byte{0, 5, 128, 133}[r.IntN(4)]})
		},
		gateways: []string{"10.1.0.2 dev left", "10.2.0.2 dev right", "10.2.0.3 dev right"},
	},
}

// prefix draws one of a few prefixes.
func (w world) prefix(r *rand.Rand) string {
	address := netip.MustParseAddr(w.prefixes[r.IntN(len(w.prefixes))])
	return netip.PrefixFrom(address, w.lengths[r.IntN(len(w.lengths))]).Masked().String()
}

// route draws a command that adds a route. The route may have one of four nexthop objects.
func (w world) route(r *rand.Rand, objects int) string {
	prefix := w.prefix(r)
	if r.IntN(8) == 0 {
		prefix = "default"
	}
	table := []int{254, 100, 101}[r.IntN(3)]
	where := fmt.Sprintf("%s table %d metric %d", prefix, table, 100+r.IntN(3))
	gateway := func() string { return w.gateways[r.IntN(len(w.gateways))] }
	switch r.IntN(10) {
	case 0:
		kinds := []string{"blackhole", "unreachable", "prohibit", "throw"}
		return fmt.Sprintf("route replace %s %s", kinds[r.IntN(4)], where)
	case 1:
		return fmt.Sprintf("route replace %s dev %s", where, []string{"left", "right"}[r.IntN(2)])
	case 2:
		return fmt.Sprintf("route replace %s nexthop via %s weight 3 nexthop via %s", where,
			w.gateways[0], w.gateways[1+r.IntN(2)])
	case 3:
		return fmt.Sprintf("route replace %s nhid %d", where, objects+r.IntN(4))
	}
	return fmt.Sprintf("route replace %s via %s", where, gateway())
}

// rule draws a command that adds a rule.
func (w world) rule(r *rand.Rand, priority int) string {
	prefix := w.prefix(r)
	selectors := []string{
		"to " + prefix, "not to " + prefix, "from " + prefix, "not from " + prefix, "fwmark 7",
		"fwmark 0/0xff", "iif lo", "iif left", "oif left", "uidrange 0-10", "uidrange 5-10",
		"ipproto 6", "tos 4", "from all",
	}
	actions := []string{
		"lookup 100", "lookup 101", "lookup 254", "lookup 254 suppress_prefixlength 0",
		"lookup 254 suppress_prefixlength 24", "lookup 100 suppress_prefixlength 48",
		"blackhole", "unreachable", "prohibit", "nop", fmt.Sprintf("goto %d", priority+1+r.IntN(4)),
	}
	return fmt.Sprintf("rule add priority %d %s %s", priority,
		selectors[r.IntN(len(selectors))], actions[r.IntN(len(actions))])
}

// TestLooksUpAsTheKernel compares lookups with those of the kernel in random networks. It leaves
// out lookups about a failed neighbour.
func TestLooksUpAsTheKernel(t *testing.T) {
	t.Parallel()
	for family, w := range worlds {
		for seed := range uint64(32) {
			t.Run(fmt.Sprintf("%s/%d", w.flag[1:], seed), func(t *testing.T) {
				t.Parallel()
				r := rand.New(rand.NewPCG(seed, uint64(family)))
				ns, commands := w.randomNetwork(t, r, family)
				compareLookups(t, ns, w, r, commands)
			})
		}
	}
}

// randomNetwork makes a namespace with random rules and routes. It also returns the commands that
// have made them.
func (w world) randomNetwork(t *testing.T, r *rand.Rand, family byte) (*testhost.Namespace, string) {
	ns, other := testhost.NewNamespace(t), testhost.NewNamespace(t)
	testhost.Connect(t, ns, "left", testhost.Prefixes("fd00:a::1/64", "10.1.0.1/24"), other, "l", nil)
	testhost.Connect(t, ns, "right", testhost.Prefixes("fd00:b::1/64", "10.2.0.1/24"), other, "r", nil)
	var objects, groups, commands []string
	for i := range r.IntN(30) {
		// Each object has one route, because for IPv6 the kernel may report any route with the
		// object.
		objects = append(objects, fmt.Sprintf("nexthop add id %d via %s", 4*i+1, w.gateways[0]),
			fmt.Sprintf("nexthop add id %d via %s", 4*i+2, w.gateways[2]),
			fmt.Sprintf("nexthop add id %d blackhole", 4*i+3))
		groups = append(groups, fmt.Sprintf("nexthop add id %d group %d,3/%d", 4*i+4, 4*i+1, 4*i+2))
		commands = append(commands, w.route(r, 4*i+1))
	}
	ip(t, ns, w.flag, objects...)
	ip(t, ns, "", groups...)
	for i := range r.IntN(9) {
		commands = append(commands, w.rule(r, 1000+i))
	}
	ip(t, ns, w.flag, commands...)
	if r.IntN(5) == 0 {
		sysctl(t, ns, w.family+"/conf/left/ignore_routes_with_linkdown", "1")
		ip(t, other, "", "link set dev l down")
		awaitDeadRoute(t, ns, family)
		commands = append(commands, "left is down")
	}
	return ns, strings.Join(commands, "\n")
}

// awaitDeadRoute returns when the kernel has noticed that an interface is down, which takes up to
// a second.
func awaitDeadRoute(t *testing.T, ns *testhost.Namespace, family byte) {
	t.Helper()
	dead := false
	for deadline := time.Now().Add(patience); !dead; time.Sleep(5 * time.Millisecond) {
		err := ns.Do(func() error {
			return readRoutes(family, func(r *route) {
				dead = dead || slices.ContainsFunc(r.paths, func(p path) bool { return p.dead })
			})
		})
		testhost.Must(t, err)
		if time.Now().After(deadline) {
			t.Fatal("no route is dead")
		}
	}
}

func compareLookups(t *testing.T, ns *testhost.Namespace, w world, r *rand.Rand, commands string) {
	var all []netip.Addr
	for range 60 {
		all = append(all, w.random(r))
	}
	targets := newTargets(all)
	want := map[netip.Addr]result{}
	err := ns.Do(func() (err error) {
		for _, target := range targets {
			if want[target], err = askKernel(target); err != nil {
				return err
			}
		}
		return err
	})
	testhost.Must(t, err)
	sysctl(t, ns, "ipv4/nexthop_compat_mode", strconv.Itoa(r.IntN(2)))
	err = ns.Do(func() error {
		p, err := readPolicy(familyOf(targets[0]), targets)
		if err != nil {
			return err
		}
		for _, target := range targets {
			compareLookup(t, target, p.lookup(target), want[target])
			compareLookup(t, target, ask(target), want[target])
		}
		return nil
	})
	testhost.Must(t, err)
	if t.Failed() {
		t.Log(commands)
	}
}

// compareLookup compares the result of a lookup with the kernel's answer, for the routes with the
// lowest metric in any order.
func compareLookup(t *testing.T, target netip.Addr, got, want result) {
	t.Helper()
	if got.err != nil && want.err != nil {
		return
	}
	order := func(a, b neighbour) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
	first := got.neighbours[:min(len(want.neighbours), len(got.neighbours))]
	same := slices.Equal(slices.SortedFunc(slices.Values(first), order),
		slices.SortedFunc(slices.Values(want.neighbours), order))
	if got.bits != want.bits || !same {
		t.Errorf("%s: got %v, the kernel says %v", target, got, want)
	}
}

// askKernel makes the kernel look up an address.
func askKernel(target netip.Addr) (f result, err error) {
	options := &netlink.RouteGetOptions{FIBMatch: true}
	routes, err := netlink.RouteGetWithOptions(target.AsSlice(), options)
	if refused, ok := errors.AsType[unix.Errno](err); ok && refused != unix.EOPNOTSUPP {
		return result{bits: -1, err: err}, nil
	}
	if err != nil {
		return f, err
	}
	r := routes[0]
	if r.Dst != nil {
		f.bits, _ = r.Dst.Mask.Size()
	}
	hops := r.MultiPath
	if len(hops) == 0 {
		hops = []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw}}
	}
	for _, hop := range hops {
		if hop.Flags&unix.RTNH_F_DEAD != 0 {
			continue
		}
		gateway, ok := netip.AddrFromSlice(hop.Gw)
		if !ok {
			gateway = target
		}
		f.neighbours = append(f.neighbours, neighbour{hop.LinkIndex, gateway.Unmap()})
	}
	return f, nil
}
