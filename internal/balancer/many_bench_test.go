// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/tables"
	"github.com/segue-lb/segue/internal/testhost"
)

// manyServices returns a configuration with services of 50 servers: half of them hunt, and half
// hash.
func manyServices(n int) *desired.Balancer {
	var services []desired.Service
	for i := range n {
		var servers []desired.Server
		for server := range 50 {
			servers = append(servers, srv6Server(fmt.Sprint("s", server), byte(1+server), 1))
		}
		vip := netip.AddrFrom4([4]byte{203, 0, 113, byte(i)})
		svc := serviceOf(fmt.Sprint("web", i), vip, 80, desired.TCP, desired.SRv6Encap, servers...)
		svc.Buckets, svc.Candidates, svc.Generations = tables.DefaultBuckets, 3, 3
		if i%2 == 1 {
			svc = huntingOf(svc, desired.SelectConsistent, 4)
		}
		services = append(services, svc)
	}
	cfg := balancerOf(services...)
	cfg.Node.Limits.Servers = 16384
	return cfg
}

// withChangedServer returns a copy of a configuration in which change was applied to a server of
// some services.
func withChangedServer(cfg *desired.Balancer, services int, change func(*desired.Server)) *desired.Balancer {
	next := *cfg
	next.Services = slices.Clone(cfg.Services)
	for i := range services {
		next.Services[i].Servers = slices.Clone(cfg.Services[i].Servers)
		change(&next.Services[i].Servers[7])
	}
	return &next
}

// measureCPU reports the CPU time that a function takes. Most of the time, a change waits for
// packets under way to leave.
func measureCPU(b *testing.B, do func()) {
	used := func() time.Duration {
		var usage unix.Rusage
		testhost.Must(b, unix.Getrusage(unix.RUSAGE_SELF, &usage))
		return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	}
	before := used()
	for b.Loop() {
		do()
	}
	b.ReportMetric(float64((used()-before).Microseconds())/1000/float64(b.N), "cpu-ms/op")
}

// BenchmarkManyServices changes a balancer with few and many services of 50 servers, and reads its
// state. docs/understand/performance.md has the results.
func BenchmarkManyServices(b *testing.B) {
	for _, n := range []int{1, 100} {
		cfg := manyServices(n)
		f := open(b, cfg)
		drain := func(s *desired.Server) { s.Drained = true }
		weigh := func(s *desired.Server) { s.Weight = new(uint32(2)) }
		name := func(what string) string { return fmt.Sprintf("services=%d/%s", n, what) }
		for what, next := range map[string]*desired.Balancer{
			"drain":             withChangedServer(cfg, 1, drain),
			"change 1 service":  withChangedServer(cfg, 1, weigh),
			"change n services": withChangedServer(cfg, n, weigh),
		} {
			b.Run(name(what), func(b *testing.B) {
				measureCPU(b, func() { // two changes
					f.mustApply(next)
					f.mustApply(cfg)
				})
			})
		}
		view := f.view()
		b.Run(name("list"), func(b *testing.B) {
			measureCPU(b, func() {
				if _, err := view.List(func(string) bool { return true }); err != nil {
					b.Fatal(err)
				}
			})
		})
		b.Run(name("status"), func(b *testing.B) {
			measureCPU(b, func() { mustSnapshot(b, view) })
		})
	}
}

// BenchmarkTellSwitch measures what a switch costs the control of 5,000 servers: after an event that
// changes nothing, and after the drain of a server.
func BenchmarkTellSwitch(b *testing.B) {
	cfg := manyServices(100)
	cfg.Node.Switch = &desired.Switch{NetworkPort: 1, HostPort: 2}
	for i := range cfg.Services {
		svc := &cfg.Services[i]
		svc.Persistence, svc.BucketHash, svc.Buckets = desired.PersistenceStateless, desired.BucketHashCRC32, 256
		svc.Candidates, svc.Generations, svc.History = 4, 8, 3
	}
	f := open(b, cfg)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	f.tellSwitch()
	<-f.Contents()
	b.Run("event", func(b *testing.B) { measureCPU(b, f.tellSwitch) })
	drained := withChangedServer(cfg, 1, func(s *desired.Server) { s.Drained = true })
	b.Run("drain", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			b.StopTimer()
			f.mustApply([]*desired.Balancer{drained, cfg}[i%2])
			b.StartTimer()
			f.tellSwitch()
			<-f.Contents()
		}
	})
}
