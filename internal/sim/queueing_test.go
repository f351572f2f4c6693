package sim_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/segue-lb/segue/internal/sim"
	"github.com/segue-lb/segue/internal/sim/placement"
)

// one is one server at load rho, whose jobs take a second in the mean.
func one(cpus int32, discipline sim.Discipline, rho float64, work sim.Distribution) *sim.Config {
	c := &sim.Config{
		Servers: []sim.Server{{
			Name: "s1", CPUs: cpus, Speed: 1, IOSpeed: 1, Discipline: discipline, Backlog: -1,
		}},
		Balancers:   []sim.Share{{Weight: 1}},
		Jobs:        []sim.Job{{Share: 1, Stages: []sim.Stage{{Work: work}}}},
		Placement:   &placement.RoundRobin{},
		Connections: 400_000,
		Warmup:      0.05,
	}
	c.Arrivals = sim.Poisson{Rate: c.Rate(rho)}
	return c
}

// erlangC is the probability that a flow waits in M/M/k, with k·rho Erlang offered.
func erlangC(k int32, rho float64) float64 {
	a := float64(k) * rho
	term, sum := 1.0, 0.0
	for i := range k {
		sum += term
		term *= a / float64(i+1)
	}
	return term / (1 - rho) / (sum + term/(1-rho))
}

func TestQueueingTheory(t *testing.T) {
	lognormal := sim.LognormalMoments(1, 2)
	for _, test := range []struct {
		name   string
		config *sim.Config
		mean   float64
	}{
		{"M/M/1", one(1, sim.FIFO, 0.8, sim.Exponential(1)), 1 / (1 - 0.8)},
		{"M/M/4", one(4, sim.FIFO, 0.8, sim.Exponential(1)), 1 + erlangC(4, 0.8)/(4*(1-0.8))},
		{"M/D/1", one(1, sim.FIFO, 0.8, sim.Constant(1)), 1 + 0.8/(2*(1-0.8))},
		{"M/G/1", one(1, sim.FIFO, 0.6, lognormal), 1 + 0.6*(1+4)/(2*(1-0.6))},
		{"M/M/1-PS", one(1, sim.ProcessorSharing, 0.8, sim.Exponential(1)), 1 / (1 - 0.8)},
		{"M/D/1-PS", one(1, sim.ProcessorSharing, 0.8, sim.Constant(1)), 1 / (1 - 0.8)},
		{"M/G/1-PS", one(1, sim.ProcessorSharing, 0.6, lognormal), 1 / (1 - 0.6)},
		{"M/M/3-PS", one(3, sim.ProcessorSharing, 0.8, sim.Exponential(1)), 1 + erlangC(3, 0.8)/(3*(1-0.8))},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := sim.Run(t.Context(), test.config, sim.Options{Seed: 1, Runs: 8})
			if err != nil {
				t.Fatal(err)
			}
			mean := r.Mean()
			t.Logf("mean %.4f ± %.4f, in theory %.4f, p99 %.3f", mean.Value, mean.Half, test.mean, r.Quantile(0.99).Value)
			if math.Abs(mean.Value-test.mean) > 1.5*mean.Half || mean.Half > 0.03*test.mean {
				t.Errorf("mean %.4f ± %.4f, want %.4f", mean.Value, mean.Half, test.mean)
			}
		})
	}
}

// figure10 is HLB's: half of the servers have twice the processors.
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

// nearby is a network like that of HLB, section V-B.
var nearby = sim.Network{
	ClientBalancer: sim.Uniform(0.0001, 0.001), BalancerServer: sim.Uniform(0.0001, 0.001),
	ServerServer: sim.Uniform(0.0001, 0.001), ServerClient: sim.Uniform(0.0001, 0.001),
}

// BenchmarkConnections measures simulated connections: each operation is one.
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
			c := figure10(test.servers, 4, 0.885, &placement.LSQ{})
			c.Network = test.network
			c.Connections = uint64(max(b.N/test.parallel, 1))
			b.ReportAllocs()
			o := sim.Options{Seed: 1, Runs: test.parallel, Parallel: test.parallel}
			if _, err := sim.Run(b.Context(), c, o); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "connections/s")
		})
	}
}
