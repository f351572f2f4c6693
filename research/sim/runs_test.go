// SPDX-License-Identifier: Apache-2.0

package sim_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

// busy is a configuration that uses everything that is random.
func busy() *sim.Config {
	c := figure10(16, 3, 0.8, inTurn{})
	c.Balancers[1].Weight = 2
	c.Network = nearby
	c.FlowTable = sim.FlowTable{Buckets: 32, Ways: 1}
	c.Jobs = append(c.Jobs, sim.Job{Share: 0.5, Stages: []sim.Stage{
		{Work: sim.Lognormal(0.1, 1)}, {Queue: sim.IO, Work: sim.Pareto(0.02, 2)},
	}})
	for i := range c.Servers {
		c.Servers[i].IOSpeed = 1
	}
	c.Timeout = 3
	c.Connections = 20_000
	c.Arrivals = sim.Poisson{Rate: c.Rate(0.8), Curve: sim.Diurnal{Period: 100, Amplitude: 0.5}}
	return c
}

// run returns the results as text, with all digits of every number.
func run(t *testing.T, c *sim.Config, seed uint64, parallel int) string {
	t.Helper()
	r, err := sim.Run(t.Context(), c, sim.Options{Seed: seed, Runs: 4, Parallel: parallel})
	testhost.Must(t, err)
	text := ""
	for _, run := range r.Runs {
		text += fmt.Sprintf("%+v\n", *run)
	}
	return text
}

func TestSameSeedSameResult(t *testing.T) {
	first := run(t, busy(), 1, 1)
	if run(t, busy(), 1, 1) != first {
		t.Error("a second time differs")
	}
	if run(t, busy(), 1, 4) != first {
		t.Error("four runs at a time differ")
	}
	if run(t, busy(), 2, 1) == first {
		t.Error("another seed does not differ")
	}
}

// The placement changes neither the flows nor their work.
func TestPlacementsSeeTheSameFlows(t *testing.T) {
	type key struct {
		sent   float64
		number uint64
		class  int32
	}
	sent := func(m sim.Method) []key {
		c := busy()
		c.Placement = m
		all, _ := flows(t, c)
		var keys []key
		for _, f := range all {
			keys = append(keys, key{f.Sent, f.Number, f.Class})
		}
		return keys
	}
	if diff := cmp.Diff(sent(inTurn{}), sent(byHash{}), cmp.AllowUnexported(key{})); diff != "" {
		t.Errorf("arrivals differ:\n%s", diff)
	}
	// Without other flows and without a network, the response time is the work.
	work := func(servers ...int32) []float64 {
		c := one(1, sim.ProcessorSharing, 0.001, sim.Exponential(1))
		c.Servers = append(c.Servers, c.Servers[0])
		c.Servers[0].CPUs, c.Servers[1].CPUs = 100, 100
		c.Placement, c.Connections = to(servers...), 1000
		c.Policy = policy(func(_ sim.Load, offer *sim.Offer) int32 { return min(offer.At+1, offer.N-1) })
		all, _ := flows(t, c)
		var responses []float64
		for _, f := range all {
			responses = append(responses, math.Round(f.Response*1e9))
		}
		return responses
	}
	if diff := cmp.Diff(work(0), work(0, 1)); diff != "" {
		t.Errorf("work differs:\n%s", diff)
	}
}

// The class of a flow says nothing about its work or its hash, if the classes are equal.
func TestClassesAreDrawnApart(t *testing.T) {
	c := one(1, sim.ProcessorSharing, 0.001, sim.Exponential(1))
	c.Jobs = append(c.Jobs, c.Jobs[0])
	c.Jobs[1].Share = 3
	c.Connections = 40_000
	var work [2]sim.Histogram
	all, r := flows(t, c)
	for _, f := range all {
		work[f.Class].Add(f.Response)
	}
	for class, share := range []float64{0.25, 0.75} {
		h := &work[class]
		if got := float64(h.Count()) / float64(r.Flows()); math.Abs(got-share) > 0.01 {
			t.Errorf("class %d: share %v, want %v", class, got, share)
		}
		if math.Abs(h.Mean()-1) > 0.05 {
			t.Errorf("class %d: mean work %v, want 1", class, h.Mean())
		}
	}
}

func TestMeasuredWindow(t *testing.T) {
	c := one(1, sim.FIFO, 0.5, sim.Constant(1))
	c.Connections, c.Warmup, c.Cooldown = 1000, 0.25, 0.5
	all, r := flows(t, c)
	if r.Flows() != 250 || all[0].Number != 250 || all[249].Number != 499 {
		t.Errorf("%d flows measured, from %d to %d", r.Flows(), all[0].Number, all[len(all)-1].Number)
	}
	c.Connections, c.Duration = 0, 400
	all, r = flows(t, c)
	if all[0].Sent < 100 || all[len(all)-1].Sent >= 200 || math.Abs(r.Elapsed-100) > 10 {
		t.Errorf("measured from %v to %v, for %v s", all[0].Sent, all[len(all)-1].Sent, r.Elapsed)
	}
	last := 0.0
	c.Placement = method(func(b *sim.Balancer) sim.Placement {
		return place(func(_ *sim.Flow, offer *sim.Offer) {
			last = b.Now()
			offer.Set(0)
		})
	})
	if flows(t, c); last < 380 || last >= 400 {
		t.Errorf("the last flow of 400 s arrives at %v", last)
	}
}

func TestConfidence(t *testing.T) {
	c := one(1, sim.FIFO, 0.5, sim.Exponential(1))
	c.Connections = 20_000
	inside := 0
	const runs = 60
	for seed := range uint64(runs) {
		r, err := sim.Run(t.Context(), c, sim.Options{Seed: seed, Runs: 1})
		testhost.Must(t, err)
		if mean := r.Mean(); math.Abs(mean.Value-2) < mean.Half {
			inside++
		}
	}
	// 57 of 60 intervals should contain the true value, with a standard deviation of 1.7.
	if inside < 50 {
		t.Errorf("%d of %d intervals from batches hold the truth", inside, runs)
	}
}

func TestCancel(t *testing.T) {
	c := one(1, sim.FIFO, 0.5, sim.Exponential(1))
	c.Connections = math.MaxUint64
	ctx, cancel := context.WithCancel(t.Context())
	c.SampleInterval = 1000
	c.Sample = func(int, float64, sim.World) { cancel() }
	if _, err := sim.Run(ctx, c, sim.Options{Seed: 1, Runs: 3}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
}

func TestFirstErrorEndsAllRuns(t *testing.T) {
	bad := one(1, sim.FIFO, 0.5, sim.Exponential(1))
	bad.Placement = nil
	endless := one(1, sim.FIFO, 0.5, sim.Exponential(1))
	endless.Connections = math.MaxUint64
	_, err := sim.RunAll(t.Context(), []*sim.Config{endless, bad}, sim.Options{Seed: 1, Runs: 1, Parallel: 2})
	if err == nil || err.Error() != "no placement" {
		t.Errorf("error %v, want no placement", err)
	}
}

// Ten times as many flows need no more memory.
func TestMemoryIsFlat(t *testing.T) {
	allocated := func(connections uint64) uint64 {
		c := figure10(16, 4, 0.8, leastQueue(t))
		c.Network, c.Connections = nearby, connections
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1}); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	allocated(1000)
	few, many := allocated(50_000), allocated(500_000)
	if many > few+few/2 {
		t.Errorf("%d bytes for 50,000 flows, %d for 500,000", few, many)
	}
}

// TestMemoryOfSizes checks that the sizes of ended flows are not kept.
func TestMemoryOfSizes(t *testing.T) {
	const lines = 200_000
	var text strings.Builder
	for i := range lines {
		fmt.Fprintf(&text, "%d\t/dummy.php/?n=1\n", i)
	}
	c := constantly(1, sim.FIFO)
	c.Jobs = []sim.Job{{Stages: []sim.Stage{{PerUnit: 0.5}}}}
	c.Arrivals = sim.Trace{
		File: write(t, "trace", text.String()), Format: sim.TimedQueries,
		Classes: []sim.TraceClass{sized}, MustMatch: true,
	}
	text.Reset()
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	var early, late int64
	c.SampleInterval = lines/2 - 1
	c.Sample = func(_ int, now float64, _ sim.World) { early, late = late, heap() }
	if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1}); err != nil {
		t.Fatal(err)
	}
	if grown := late - early; early == 0 || grown > 8*lines/2 {
		t.Errorf("%d bytes at half of %d flows, %d at the end", early, lines, late)
	}
}

// TestFairnessOfThirds checks that rounding errors do not add up. On servers with three
// processors, flows per processor are rounded numbers.
func TestFairnessOfThirds(t *testing.T) {
	c := figure10(2, 1, 0.1, inTurn{})
	for i := range c.Servers {
		c.Servers[i].CPUs = 3
	}
	c.Connections = 1000
	r := runOnce(t, c)
	if !(r.InstantFairness >= 0.5 && r.InstantFairness <= 1) {
		t.Errorf("instant fairness of two servers %v, want 0.5 to 1", r.InstantFairness)
	}
}

// TestNothingIsMeasured checks that results over no time, and results about no flows, are NaN.
func TestNothingIsMeasured(t *testing.T) {
	c := constantly(2, sim.FIFO, 0.5, 1)
	c.Duration, c.Warmup, c.Every = 10, 0.5, 1
	_, r := flows(t, c)
	for name, value := range map[string]float64{
		"utilisation": r.Utilisation, "open": r.Open, "fairness": r.Fairness, "instant fairness": r.InstantFairness,
		"a server's utilisation": r.Servers[0].Utilisation, "a server's open": r.Servers[0].Open,
	} {
		if !math.IsNaN(value) {
			t.Errorf("%s: %v", name, value)
		}
	}
	if idle := r.Series[0]; len(r.Series) != 1 || idle.Utilisation != 0.25 {
		t.Errorf("%d intervals, the first %+v", len(r.Series), idle)
	}
}

// TestRunsWithoutFlows checks that shares are those of the flows of all runs, even if some runs
// have no flows.
func TestRunsWithoutFlows(t *testing.T) {
	run := func(completed, lost uint64) *sim.RunResult {
		m := sim.Measures{Fairness: math.NaN()}
		if completed > 0 {
			m.Fairness = 0.5
		}
		m.Outcomes[sim.Completed], m.Outcomes[sim.Lost] = completed, lost
		return &sim.RunResult{Measures: m}
	}
	r := &sim.Result{Runs: []*sim.RunResult{run(9, 0), run(0, 0), run(1, 2)}}
	if lost := r.Share(sim.Lost); math.Abs(lost.Value-2./12) > 1e-9 || !(lost.Half > 0) {
		t.Errorf("%v of 12 flows are lost, want 2", lost)
	}
	if fairness := r.Fairness(); fairness.Value != 0.5 || fairness.Half != 0 {
		t.Errorf("fairness %v, want 0.5 of two runs", fairness)
	}
}

// Flows that a drained server still has do not count as unfairness among the servers that take new
// flows.
func TestFairnessIsThatOfLiveServers(t *testing.T) {
	c := constantly(2, sim.ProcessorSharing, 0, 0, 0, 0, 0, 0.25, 10)
	c.Events = []sim.Event{{At: 0.125, Kind: sim.ServerDrain, Servers: []int32{0}}}
	c.Connections, c.Cooldown = 7, 1./7 // up to 10 s
	c.Placement = method(func(b *sim.Balancer) sim.Placement {
		return place(func(_ *sim.Flow, offer *sim.Offer) { offer.Set(b.Live[0]) })
	})
	_, r := flows(t, c)
	// Until 0.125 one of two servers has all flows. From then on only one server counts, which has
	// one flow for a second.
	if want := (0.125*0.5 + 9.875) / 10; math.Abs(r.InstantFairness-want) > 1e-9 {
		t.Errorf("instant fairness %v, want %v", r.InstantFairness, want)
	}
	sum, squares, servers := 0.125*5+1, 0.125*25+1, 0.125*2+9.875
	if want := sum * sum / (squares * servers); math.Abs(r.Fairness-want) > 1e-9 {
		t.Errorf("fairness %v, want %v", r.Fairness, want)
	}
}
