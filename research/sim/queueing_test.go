// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"math"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// one is a configuration of one server at load rho, whose jobs take a second on average.
func one(cpus int32, discipline sim.Discipline, rho float64, work sim.Distribution) *sim.Config {
	c := &sim.Config{
		Servers: []sim.Server{{
			Name: "s1", CPUs: cpus, Speed: 1, IOSpeed: 1, Discipline: discipline, Backlog: -1,
		}},
		Balancers:   []sim.Share{{Weight: 1}},
		Jobs:        []sim.Job{{Share: 1, Stages: []sim.Stage{{Work: work}}}},
		Placement:   inTurn{},
		Connections: 100_000,
		Warmup:      0.05,
	}
	c.Arrivals = sim.Poisson{Rate: c.Rate(rho)}
	return c
}

// erlangC returns the probability that a flow waits in M/M/k, with k·rho Erlang offered.
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
			testhost.Must(t, err)
			mean := r.Mean()
			t.Logf("mean %.4f ± %.4f, in theory %.4f, p99 %.3f", mean.Value, mean.Half, test.mean, r.Quantile(0.99).Value)
			if math.Abs(mean.Value-test.mean) > 1.5*mean.Half || mean.Half > 0.05*test.mean {
				t.Errorf("mean %.4f ± %.4f, want %.4f", mean.Value, mean.Half, test.mean)
			}
		})
	}
}

// erlangB returns the share of flows that find all k processors busy in M/M/k/k.
func erlangB(k int32, offered float64) float64 {
	b := 1.0
	for i := range k {
		b = offered * b / (float64(i+1) + offered*b)
	}
	return b
}

func TestFullServersRefuseAsInTheory(t *testing.T) {
	limited := func(c *sim.Config, workers, backlog int32) *sim.Config {
		c.Servers[0].Workers, c.Servers[0].Backlog = workers, backlog
		return c
	}
	work := sim.Exponential(1)
	// M/M/1/K refuses a share of (1-rho) rho^K / (1 - rho^(K+1)).
	refused := func(rho, k float64) float64 { return (1 - rho) * math.Pow(rho, k) / (1 - math.Pow(rho, k+1)) }
	for _, test := range []struct {
		name   string
		config *sim.Config
		share  float64
	}{
		{"M/M/4/4", limited(one(4, sim.FIFO, 0.9, work), 0, 0), erlangB(4, 3.6)},
		{"M/M/1/6", limited(one(1, sim.FIFO, 0.9, work), 0, 5), refused(0.9, 6)},
		{"M/M/1-PS/6", limited(one(1, sim.ProcessorSharing, 0.9, work), 2, 4), refused(0.9, 6)},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := sim.Run(t.Context(), test.config, sim.Options{Seed: 2, Runs: 8})
			testhost.Must(t, err)
			share := r.Share(sim.Refused)
			t.Logf("refused %.5f ± %.5f, in theory %.5f", share.Value, share.Half, test.share)
			if math.Abs(share.Value-test.share) > 1.5*share.Half || share.Half > 0.02*test.share {
				t.Errorf("refused %.5f ± %.5f, want %.5f", share.Value, share.Half, test.share)
			}
		})
	}
}

// A job that uses the processor and then the IO queue passes two M/M/1 queues, by Jackson's and
// Burke's theorems.
func TestStagesInTandem(t *testing.T) {
	c := one(1, sim.FIFO, 0.5, sim.Exponential(1))
	c.Jobs[0].Stages = append(c.Jobs[0].Stages, sim.Stage{Queue: sim.IO, Work: sim.Exponential(1.5)})
	r, err := sim.Run(t.Context(), c, sim.Options{Seed: 3, Runs: 8})
	testhost.Must(t, err)
	want := 1/(1-0.5) + 1.5/(1-0.75)
	mean := r.Mean()
	if math.Abs(mean.Value-want) > 1.5*mean.Half || mean.Half > 0.03*want {
		t.Errorf("mean %.4f ± %.4f, want %.4f", mean.Value, mean.Half, want)
	}
}

// With single choice the servers are M/M/1 queues. Jain's index is rho/(1+rho) (6LB, section V-D),
// the utilisation is rho, and the number of flows is rho/(1-rho).
func TestServersAreUsedAsInTheory(t *testing.T) {
	const rho, servers = 0.7, 50
	c := one(1, sim.FIFO, rho, sim.Exponential(1))
	for i := 1; i < servers; i++ {
		c.Servers = append(c.Servers, c.Servers[0])
	}
	c.Arrivals = sim.Poisson{Rate: c.Rate(rho)}
	c.Placement = byHash{}
	c.Connections, c.Cooldown = 250_000, 0.05
	r, err := sim.Run(t.Context(), c, sim.Options{Seed: 4, Runs: 8})
	testhost.Must(t, err)
	open := r.Estimate(func(run *sim.RunResult) float64 {
		sum := 0.0
		for _, s := range run.Servers {
			sum += s.Open / servers
		}
		return sum
	})
	for _, test := range []struct {
		name string
		got  sim.Estimate
		want float64
	}{
		{"fairness", r.Fairness(), rho / (1 + rho)},
		{"utilisation", r.Utilisation(), rho},
		{"open flows", open, rho / (1 - rho)},
	} {
		if math.Abs(test.got.Value-test.want) > 1.5*test.got.Half || test.got.Half > 0.03*test.want {
			t.Errorf("%s %.4f ± %.4f, want %.4f", test.name, test.got.Value, test.got.Half, test.want)
		}
	}
}
