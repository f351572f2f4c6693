// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"math"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// interval has the fields of an interval that tests compare.
type interval struct {
	Flows                                      uint64
	Mean, Utilisation, Open, Fairness, Instant float64
}

func intervals(r *sim.RunResult) (all []interval) {
	for i := range r.Series {
		m := &r.Series[i]
		mean := m.Response.Mean()
		if m.Flows() == 0 {
			mean = 0
		}
		all = append(all, interval{m.Flows(), mean, m.Utilisation, m.Open, m.Fairness, m.InstantFairness})
	}
	return all
}

// near compares numbers, except for rounding errors.
var near = cmpopts.EquateApprox(1e-9, 1e-12)

// TestSeries has one server that serves flows one after the other: from 0.5 to 1.5, to 2.5, to 3.5
// and to 4.5. The interval in which the last flow arrives is not complete.
func TestSeries(t *testing.T) {
	c := constantly(1, sim.FIFO, 0.5, 0.75, 2.5, 3.5)
	c.Every = 1
	_, r := flows(t, c)
	want := []interval{
		{Flows: 2, Mean: 1.375, Utilisation: 0.5, Open: 0.75, Fairness: 0.75 * 0.75 / 1.25, Instant: 1},
		{Flows: 0, Utilisation: 1, Open: 1.5, Fairness: 1.5 * 1.5 / 2.5, Instant: 1},
		{Flows: 1, Mean: 1, Utilisation: 1, Open: 1, Fairness: 1, Instant: 1},
	}
	if diff := cmp.Diff(want, intervals(r), near); diff != "" {
		t.Errorf("intervals (-want +got):\n%s", diff)
	}
}

// TestSeriesOfTenths checks that a flow that arrives at the beginning of an interval belongs to
// this interval, although tenths are rounded.
func TestSeriesOfTenths(t *testing.T) {
	var at []float64
	for i := range 101 {
		at = append(at, float64(i)/10)
	}
	c := constantly(1, sim.FIFO, at...)
	c.Every = 0.1
	_, r := flows(t, c)
	for i := range r.Series {
		if n := r.Series[i].Flows(); n != 1 {
			t.Errorf("interval %d: %d flows, want 1", i, n)
		}
	}
}

// TestSeriesEnd checks that intervals continue to the end of a duration, even if no flow is left.
func TestSeriesEnd(t *testing.T) {
	for _, test := range []struct {
		duration, every float64
		want            int
	}{{10, 1, 10}, {10, 0.1, 100}, {10, 3, 3}, {10, 11, 0}, {0, 3, 6}, {0, 0.0001, sim.MostIntervals}} {
		c := constantly(1, sim.FIFO, 0.5, 20)
		c.Duration, c.Every = test.duration, test.every
		if _, r := flows(t, c); len(r.Series) != test.want {
			t.Errorf("%v s by %v s: %d intervals, want %d", test.duration, test.every, len(r.Series), test.want)
		}
	}
}

// eventfulDuration is a configuration like busy, in which a server and a balancer are added and
// fail.
func eventfulDuration() *sim.Config {
	c := busy()
	c.Connections, c.Duration = 0, 300
	c.Warmup, c.Cooldown = 0, 0
	c.Events = []sim.Event{
		{At: 33, Kind: sim.ServerFail, Servers: []int32{3}, Detect: 2},
		{At: 50, Kind: sim.BalancerFail, Balancers: []int32{1}},
		{At: 77, Kind: sim.ServerAdd, Servers: []int32{3}},
	}
	return c
}

func runOnce(t *testing.T, c *sim.Config) *sim.RunResult {
	t.Helper()
	r, err := sim.Run(t.Context(), c, sim.Options{Seed: 3, Runs: 1})
	testhost.Must(t, err)
	return r.Runs[0]
}

// TestSeriesIsWhole checks that the intervals add up to the run, and do not change its results.
func TestSeriesIsWhole(t *testing.T) {
	c := eventfulDuration()
	whole := runOnce(t, c)
	c.Every = 7.5
	inside := runOnce(t, c)
	if len(inside.Series) != 40 {
		t.Fatalf("%d intervals, want 40", len(inside.Series))
	}
	var sum sim.Measures
	for i := range inside.Series {
		m := &inside.Series[i]
		for o, n := range m.Outcomes {
			sum.Outcomes[o] += n
		}
		sum.Response.Merge(&m.Response)
		sum.Hops, sum.Wrongful, sum.Untracked, sum.Recovered = sum.Hops+m.Hops, sum.Wrongful+m.Wrongful, sum.Untracked+m.Untracked, sum.Recovered+m.Recovered
		sum.Elapsed += m.Elapsed
		sum.Utilisation += m.Utilisation / 40
	}
	if sum.Outcomes != whole.Outcomes || sum.Hops != whole.Hops || sum.Wrongful != whole.Wrongful || sum.Untracked != whole.Untracked ||
		sum.Untracked == 0 || sum.Recovered != whole.Recovered {
		t.Errorf("of all intervals %v, of the run %v", sum, whole.Measures)
	}
	// The run is measured from its first flow to its last, and the intervals from 0 to the end.
	if sum.Response.Quantile(0.9) != whole.Response.Quantile(0.9) || math.Abs(sum.Utilisation-whole.Utilisation) > 0.001 {
		t.Errorf("p90 %v and %v, utilisation %v and %v", sum.Response.Quantile(0.9), whole.Response.Quantile(0.9), sum.Utilisation, whole.Utilisation)
	}
	inside.Series = nil
	all := cmp.Exporter(func(reflect.Type) bool { return true })
	if diff := cmp.Diff(whole, inside, all); diff != "" {
		t.Errorf("the run (-without +with intervals):\n%s", diff)
	}
}

// TestSeriesIsOfAll checks that intervals do not depend on which flows of the run are measured.
func TestSeriesIsOfAll(t *testing.T) {
	c := eventfulDuration()
	c.Every = 7.5
	all := intervals(runOnce(t, c))
	c.Warmup, c.Cooldown = 0.31, 0.21
	if diff := cmp.Diff(all, intervals(runOnce(t, c)), near); diff != "" {
		t.Errorf("intervals (-all +some measured):\n%s", diff)
	}
}

// TestIntervals checks that the results of an interval cover all runs, for the intervals that all
// runs have.
func TestIntervals(t *testing.T) {
	c := busy()
	c.Every = 10
	r, err := sim.Run(t.Context(), c, sim.Options{Seed: 3, Runs: 3})
	testhost.Must(t, err)
	least := math.MaxInt
	flows, mean := uint64(0), 0.0
	for _, run := range r.Runs {
		least = min(least, len(run.Series))
		flows += run.Series[1].Flows()
		mean += run.Series[1].InstantFairness / 3
	}
	all := r.Intervals()
	if len(all) != least || all[1].Flows() != flows || math.Abs(all[1].InstantFairness().Value-mean) > 1e-12 {
		t.Errorf("%d intervals, want %d; the second of %d flows, want %d; fairness %v, want %v",
			len(all), least, all[1].Flows(), flows, all[1].InstantFairness(), mean)
	}
}
