// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// figure10 is the set-up of HLB's figure 10: half of the servers have twice as many processors.
func figure10(servers, balancers int, rho float64, m sim.Method) *sim.Config {
	c := &sim.Config{
		Jobs:        []sim.Job{{Share: 1, Stages: []sim.Stage{{Work: sim.Exponential(0.5)}}}},
		Placement:   m,
		Connections: 1_000_000,
		Warmup:      0.25,
		Cooldown:    0.25,
	}
	for i := range servers {
		c.Servers = append(c.Servers, sim.Server{
			Name: fmt.Sprintf("s%d", i+1), CPUs: 1 + int32(2*i/servers), Speed: 1, Backlog: 64,
		})
	}
	for range balancers {
		c.Balancers = append(c.Balancers, sim.Share{Weight: 1})
	}
	c.Arrivals = sim.Poisson{Rate: c.Rate(rho)}
	return c
}

// nearby is a network as in HLB, section V-B.
var nearby = sim.Network{
	ClientBalancer: sim.Uniform(0.0001, 0.001), BalancerServer: sim.Uniform(0.0001, 0.001),
	ServerServer: sim.Uniform(0.0001, 0.001), ServerClient: sim.Uniform(0.0001, 0.001),
}

// leastQueue is the placement least-queue of package placement. It counts flows from the SYN.
func leastQueue(t testing.TB) sim.Method {
	t.Helper()
	spec, err := placement.Named("least-queue")
	testhost.Must(t, err)
	spec.(*placement.LeastQueue).Count = placement.CountPlaced
	method, _, err := spec.Build()
	testhost.Must(t, err)
	return method
}

// cpuTime returns the processor time of the process in seconds. On a machine with other work,
// elapsed time would say less.
func cpuTime(b *testing.B) float64 {
	b.Helper()
	var use unix.Rusage
	testhost.Must(b, unix.Getrusage(unix.RUSAGE_SELF, &use))
	return time.Duration(use.Utime.Nano() + use.Stime.Nano()).Seconds()
}

// BenchmarkConnections measures simulated connections. One operation is one connection.
func BenchmarkConnections(b *testing.B) {
	for _, test := range []struct {
		name              string
		servers, parallel int
		network           sim.Network
	}{
		{"servers=128", 128, 1, sim.Network{}},
		{"servers=128/delays", 128, 1, nearby},
		{"servers=10000", 10_000, 1, sim.Network{}},
		{"servers=10000/delays", 10_000, 1, nearby},
		{"servers=128/cores=2", 128, 2, sim.Network{}},
	} {
		b.Run(test.name, func(b *testing.B) {
			c := figure10(test.servers, 4, 0.885, leastQueue(b))
			c.Network = test.network
			c.Connections = uint64(max(b.N/test.parallel, 1))
			b.ReportAllocs()
			o := sim.Options{Seed: 1, Runs: test.parallel, Parallel: test.parallel}
			before := cpuTime(b)
			if _, err := sim.Run(b.Context(), c, o); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "connections/s")
			b.ReportMetric(float64(b.N)/(cpuTime(b)-before), "connections/core-s")
		})
	}
}
