// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
	"github.com/segue-lb/segue/internal/testhost"
)

// cpuTime returns the CPU time that this process has used, in user space and in the kernel.
func cpuTime(t testing.TB) time.Duration {
	t.Helper()
	var usage unix.Rusage
	testhost.Must(t, unix.Getrusage(unix.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// BenchmarkProbes sends the probes of one second to 10,000 servers of a service that hunts, by XDP
// and by a packet socket. The result is the metric cpu-ms/op: the CPU time of the process in that
// second. It does not contain the answers, which XDP takes.
func BenchmarkProbes(b *testing.B) {
	const servers = 10000
	all := make([]desired.Server, servers)
	one := uint32(1)
	for i := range all {
		locator := netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 6: byte(i >> 8), 7: byte(i)})
		all[i] = desired.Server{Name: fmt.Sprint("s", i), Locator: netip.PrefixFrom(locator, 64), Weight: &one}
	}
	yes := true
	svc := huntingOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Insert, all...), desired.SelectConsistent, 2)
	svc.Probe, svc.Buckets = &yes, 65537
	cfg := balancerOf(svc)
	cfg.Node.Limits.Servers = servers
	f := open(b, cfg)
	f.leaveSharedNetwork()
	for _, mode := range []datapath.Mode{datapath.Native, datapath.Generic} {
		b.Run(string(mode), func(b *testing.B) {
			f.t = b
			w := dataplane.NewWire(f.plane)
			w.LeaveBy(f.ifindex["out"], mode)
			p := probe.New(w, nil, 1, slog.New(slog.DiscardHandler))
			p.Replace(f.services.probeTargets())
			before := cpuTime(b)
			f.must(f.ns.Do(func() error {
				for range b.N {
					p.Round()
				}
				return nil
			}))
			b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/1000/float64(b.N), "cpu-ms/op")
		})
	}
}
