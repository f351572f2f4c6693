// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
)

// BenchmarkInference measures what inferring costs the process, with 10,000 servers: a sample of
// all counters, which it takes every 20 ms, and a step of each estimator, every 500 ms.
func BenchmarkInference(b *testing.B) {
	for _, estimator := range []desired.Estimator{
		desired.EstimateTerritoryLearned, desired.EstimateTerritory, desired.EstimateDurations,
	} {
		b.Run(string(estimator), func(b *testing.B) {
			f := openThousands(b, 10000, estimator)
			in, now := f.inference.byName["web"], time.Now()
			b.Run("sample", func(b *testing.B) {
				for b.Loop() {
					now = now.Add(sampleInterval)
					in.sample(f.plane.Loads, now)
				}
			})
			b.Run("step", func(b *testing.B) {
				for b.Loop() {
					now = now.Add(in.interval)
					f.must(f.inference.step(in, now))
				}
			})
		})
	}
}

// openThousands opens a balancer that infers, with the given number of servers.
func openThousands(b *testing.B, servers int, estimator desired.Estimator) *fixture {
	var all []desired.Server
	for i := range servers {
		server := srv6Server(fmt.Sprint("s", i), 0, 1)
		locator := netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 6: byte(i >> 8), 7: byte(i)})
		server.Locator = netip.PrefixFrom(locator, 64)
		all = append(all, server)
	}
	cfg := inferring(all...)
	cfg.Services[0].Infer.Estimator, cfg.Services[0].Buckets = estimator, 65537
	cfg.Node.Limits.Servers = uint32(servers)
	return open(b, cfg)
}
