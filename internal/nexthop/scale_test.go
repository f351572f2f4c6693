// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// many is a balancer with many servers. Each server has its own route and its own neighbour.
func many(tb testing.TB, servers int) (balancer *testhost.Namespace, r *Resolver) {
	balancer, fabric := testhost.NewNamespace(tb), testhost.NewNamespace(tb)
	testhost.Connect(tb, balancer, "eth0", testhost.Prefixes("fd00:a::1/64"), fabric, "lb", nil)
	var commands []string
	var targets []netip.Addr
	for i := range servers {
		commands = append(commands, fmt.Sprintf("route add fd00:5:0:%x::/64 via fd00:a::1:%x", i, i),
			fmt.Sprintf("neigh add fd00:a::1:%x lladdr 02:00:00:00:00:01 dev eth0", i))
		targets = append(targets, netip.MustParseAddr(fmt.Sprintf("fd00:5:0:%x:5::", i)))
	}
	ip(tb, balancer, "-6", commands...)
	r = New([]string{"eth0"}, slog.New(slog.DiscardHandler))
	r.retarget(targets)
	return balancer, r
}

// TestListsThatLackRoutes reads the routing table while other routes are added and removed. Many
// routes are missing from such a list.
func TestListsThatLackRoutes(t *testing.T) {
	t.Parallel()
	const servers, others = 3000, 10000
	balancer, r := many(t, servers)
	var before, storm []string
	for i := range others {
		former := fmt.Sprintf("fd00:4:%x:%x::/64 dev eth0", i/256, i%256)
		later := fmt.Sprintf("fd00:6:%x:%x::/64 dev eth0", i/256, i%256)
		before = append(before, "route add "+former)
		storm = append(storm, "route del "+former, "route add "+later)
	}
	ip(t, balancer, "-6", before...)
	ended := make(chan error, 1)
	go func() { ended <- batch(balancer, "-6", storm...) }()
	err := balancer.Do(func() error {
		for {
			got, err := r.resolve()
			if len(got.Hops) != servers {
				return errors.Join(fmt.Errorf("%d hops of %d", len(got.Hops), servers), err, <-ended)
			}
			select {
			case err := <-ended:
				return err
			default:
			}
		}
	})
	if err != nil {
		t.Error(err)
	}
}

// BenchmarkResolve reads the kernel's tables for 10,000 servers.
func BenchmarkResolve(b *testing.B) {
	const servers = 10000
	balancer, r := many(b, servers)
	err := balancer.Do(func() error {
		for b.Loop() {
			if got, err := r.resolve(); len(got.Hops) != servers {
				return errors.Join(fmt.Errorf("%d hops", len(got.Hops)), err)
			}
		}
		return nil
	})
	testhost.Must(b, err)
}
