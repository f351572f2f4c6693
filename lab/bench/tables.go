// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/tables"
)

// TableSize is the size of a candidate table.
type TableSize struct {
	Servers    int `json:"servers"`
	Buckets    int `json:"buckets"`
	Candidates int `json:"candidates"`
}

// TableSizes are the sizes for a small, a large and a very large service.
var TableSizes = []TableSize{{10, 65537, 2}, {1000, 65537, 2}, {10000, 1000003, 2}}

// TableTime has the times of a change of a service's servers, each the median of several changes.
type TableTime struct {
	TableSize
	// Build is the time to compute the new table.
	Build time.Duration `json:"build_ns"`
	// Swap is the time to apply a configuration that has one server more or less, until packets are
	// placed by the new table. It includes the time to build the table.
	Swap time.Duration `json:"swap_ns"`
}

// MeasureTables measures the times of changes of tables of the given sizes. changes is the number
// of changes of each table. It needs root, because the tables are maps of the kernel.
func MeasureTables(
	ctx context.Context, sizes []TableSize, changes int, progress Progress,
) ([]TableTime, error) {
	var times []TableTime
	for _, size := range sizes {
		progress.say("change a table of %d servers", size.Servers)
		build, err := buildTime(ctx, size, changes)
		if err != nil {
			return nil, err
		}
		swap, err := swapTime(ctx, size, changes)
		if err != nil {
			return nil, fmt.Errorf("table of %d servers and %d buckets: %w",
				size.Servers, size.Buckets, err)
		}
		times = append(times, TableTime{size, build, swap})
	}
	return times, nil
}

// buildTime returns the median time to compute a table.
func buildTime(ctx context.Context, size TableSize, changes int) (time.Duration, error) {
	servers := make([]tables.Server, size.Servers)
	for i := range servers {
		servers[i] = tables.Server{Name: serverName(i), Weight: 1}
	}
	return medianTime(ctx, changes, func(int) error {
		_, err := tables.Build(servers, size.Buckets, size.Candidates)
		return err
	})
}

// swapTime returns the median time to apply a configuration. The configurations alternately lack
// the last server of a service and have it again.
func swapTime(ctx context.Context, size TableSize, changes int) (_ time.Duration, err error) {
	all, fewer := tableConfig(size, size.Servers), tableConfig(size, size.Servers-1)
	b, err := balancer.NewRehearsal(all, desired.Secrets{}, slog.New(slog.DiscardHandler))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	return medianTime(ctx, changes, func(i int) error {
		return b.Apply([]*desired.Balancer{fewer, all}[i%2])
	})
}

// tableConfig returns the configuration of a balancer with one service, which has a table of the
// given size and the given number of servers.
func tableConfig(size TableSize, servers int) *desired.Balancer {
	web := desired.Service{
		Name: "web", VIP: netip.MustParseAddr("2001:db8:80::1"), Port: 80, Protocol: desired.TCP,
		Placement: desired.PlacementHash, Persistence: desired.PersistenceTable,
		Encapsulation: desired.SRv6Encap,
		Candidates:    size.Candidates, Generations: 3, Buckets: size.Buckets,
	}
	one := uint32(1)
	for i := range servers {
		locator := netip.AddrFrom16(
			[16]byte{0xfd, 0, 0, 5, 5: byte(i >> 16), 6: byte(i >> 8), 7: byte(i)})
		web.Servers = append(web.Servers, desired.Server{
			Name: serverName(i), Locator: netip.PrefixFrom(locator, srv6.LocatorBits), Weight: &one,
		})
	}
	return &desired.Balancer{
		Node: desired.BalancerNode{
			Instance: fmt.Sprintf("bench-%d", os.Getpid()),
			Locator:  netip.MustParsePrefix("fd00:6c:0:1::/64"),
			Limits:   desired.Limits{Flows: 1024, Servers: uint32(size.Servers)},
		},
		Services: []desired.Service{web},
	}
}

func serverName(i int) string { return fmt.Sprintf("s%d", i) }

// medianTime calls f(0) to f(n-1), and returns the median time of a call.
func medianTime(ctx context.Context, n int, f func(i int) error) (time.Duration, error) {
	times := make([]time.Duration, n)
	for i := range times {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		start := time.Now()
		if err := f(i); err != nil {
			return 0, err
		}
		times[i] = time.Since(start)
	}
	slices.Sort(times)
	return times[n/2], nil
}
