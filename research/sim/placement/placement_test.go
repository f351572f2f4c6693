// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
)

func TestParameters(t *testing.T) {
	for want, spec := range map[string]Spec{
		"candidates 0: must be 1 to 8":                              &Hash{},
		"candidates 9: must be 1 to 8":                              &SR{Hunt: Hunt{Candidates: 9}},
		"15 buckets: neither a prime nor a power of two":            &Hash{Candidates: 1, Buckets: 15},
		"threshold -1: must be 0 to 2147483647":                     &SR{Hunt: Hunt{Candidates: 2}, Threshold: -1},
		"window 0: must be 1 to 1000000":                            &SRDyn{Hunt: Hunt{Candidates: 2}},
		"epsilon 0.5: must be 0 to 0.499999":                        &SRDyn{Hunt: Hunt{Candidates: 2}, Window: 1, Epsilon: 0.5},
		"limit -1: must be 0 to 2147483647":                         &SRDyn{Hunt: Hunt{Candidates: 2}, Window: 1, Limit: -1},
		"chain 3: must be 0 to 2":                                   &Least{Hunt: Hunt{Candidates: 2}, Chain: 3},
		"spare: with reports only":                                  &Least{Hunt: Hunt{Candidates: 2}, Spare: 1},
		"choices 9: must be 0 to 8":                                 &LeastQueue{Own: Own{Choices: 9}},
		"choices and candidates: only one of them can be set":       &SED{Own: Own{Choices: 2, Candidates: 2}},
		`ties "none": must be random or first or own-order or home`: &LeastQueue{Own: Own{Ties: "none"}},
		`count "now": must be placed or connected`:                  &Twos{Count: "now"},
		"steps -1: must be 0 to 2147483647":                         &HLB{Weights: Weights{Steps: -1}},
		`norm "max": must be sum or mean`:                           &HLB{Weights: Weights{Norm: "max"}},
		`sampling "all": must be flow-ends or as-printed`:           &HLB{Weights: Weights{Sampling: "all"}},
		`unseen "zero": not with sampling as-printed, which begins with zeros`: &HLB{
			Weights: Weights{Sampling: SamplingAsPrinted, Unseen: "zero"},
		},
		"interval: for learned capacities only":      &Territory{Interval: time.Second},
		"interval -1s: must be 1ms to 1h0m0s":        &AWCMP{Polled{Interval: -time.Second}},
		"interval 0s: must be 1ms to 1h0m0s":         &TWF{},
		"age 2h0m0s: must be 0s to 1h0m0s":           &Least{Hunt: Hunt{Candidates: 2}, Age: 2 * time.Hour},
		`kind "best": must be territory-learned or `: &Infer{Kind: "best"},
		"polled 0s: must be 1ms to 1h0m0s":           &Infer{},
		"interval 1ms: must be 1s to 1h0m0s":         &Infer{Polled: time.Second, Interval: time.Millisecond},
		"slow-start -1s: must be 0s to 1h0m0s":       &Infer{SlowStart: -time.Second},
		"silent 0s: must be 1ms to 1h0m0s":           &Infer{},
		"quantile 2: must be 0 to 1":                 &Prequal{Probes: 1, Pool: 1, Age: time.Second, Quantile: 2},
	} {
		if _, _, err := spec.Build(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%T: %v, want %s", spec, err, want)
		}
	}
}

func TestNames(t *testing.T) {
	for _, name := range Names() {
		spec, err := Named(name)
		testhost.Must(t, err)
		if again, _ := Named(name); reflect.ValueOf(spec).Elem().Type().Size() > 0 && spec == again {
			t.Errorf("%s: two scenarios share their parameters", name)
		}
		if _, _, err := spec.Build(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Named("best"); err == nil || !strings.Contains(err.Error(), "must be one of awcmp, ") {
		t.Errorf("an unknown name: %v", err)
	}
}

// TestNamesOfTheBalancer checks that the simulator has every placement of a balancer by its name there.
func TestNamesOfTheBalancer(t *testing.T) {
	for _, m := range desired.PlacementMethods {
		if _, err := Named(string(m.Name)); err != nil {
			t.Errorf("%s: %v", m.Name, err)
		}
	}
}

// TestLottery checks that servers are drawn in proportion to their weights, and servers of weight
// 0 never.
func TestLottery(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		weights := rapid.SliceOfN(rapid.SampledFrom([]float64{0, 1, 2, 5}), 1, 9).Draw(t, "weights")
		var servers []int32
		sum := 0.0
		for i, w := range weights {
			servers = append(servers, int32(i))
			sum += w
		}
		var l lottery
		l.set(servers, func(s int32) float64 { return weights[s] })
		drawn, n := make([]float64, len(weights)), 1000
		for i := range n {
			drawn[l.draw((float64(i)+0.5)/float64(n))]++
		}
		for s, w := range weights {
			want := w / sum
			if sum == 0 {
				want = 1 / float64(len(weights))
			}
			if math.Abs(drawn[s]/float64(n)-want) > 1.5/float64(n) {
				t.Fatalf("server %d of weights %v drawn %v of %d times", s, weights, drawn[s], n)
			}
		}
	})
	if s := (&lottery{}).draw(0.5); s != -1 {
		t.Errorf("server %d of none", s)
	}
}

// TestWaterLevel checks that the water between the queues and the level is the water that was
// poured in.
func TestWaterLevel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		queue := rapid.SliceOfN(rapid.Float64Range(0, 20), 1, 20).Draw(t, "queue")
		water := rapid.Float64Range(0.5, 100).Draw(t, "water")
		p := &twf{poll: poll{b: &sim.Balancer{}}, queue: queue}
		for s := range queue {
			p.b.Live = append(p.b.Live, int32(s))
		}
		level, poured := p.level(water), 0.0
		for _, q := range queue {
			poured += max(0, level-q)
		}
		if math.Abs(poured-water) > 1e-9 {
			t.Fatalf("%v poured, %v wanted, level %v of %v", poured, water, level, queue)
		}
	})
}

// TestTidalWaterFilling checks the optimum. All balancers draw the servers of their flows by the
// probabilities. The sum of the expected squares of the distances between queues and level must be
// the smallest. So it must grow if any two servers exchange a part of their probability.
func TestTidalWaterFilling(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := &twf{poll: poll{b: &sim.Balancer{Peers: []int32{0, 1, 2}}}}
		p.placed = rapid.IntRange(1, 10).Draw(t, "placed")
		flows := float64(3 * p.placed)
		p.Step()
		p.queue = rapid.SliceOfN(rapid.Float64Range(0, 20), 2, 8).Draw(t, "queue")
		for s := range p.queue {
			p.b.Live = append(p.b.Live, int32(s))
		}
		p.fill()
		level, total := p.level(flows), p.lottery.sums[len(p.queue)-1]
		share, before := make([]float64, len(p.queue)), 0.0
		for s, sum := range p.lottery.sums {
			share[s], before = (sum-before)/total, sum
		}
		cost := func(share []float64) (sum float64) {
			for s, q := range p.queue {
				mean := q + flows*share[s] - level
				sum += mean*mean + flows*share[s]*(1-share[s])
			}
			return sum
		}
		least := cost(share)
		for from := range share {
			for to := range share {
				other := slices.Clone(share)
				by := min(other[from], 1e-3)
				other[from] -= by
				other[to] += by
				if c := cost(other); c < least-1e-9 {
					t.Fatalf("queues %v, %v flows, shares %v: %v; %v with %v", p.queue, flows, share, least, c, other)
				}
			}
		}
	})
}

// TestTurns checks that weighted round-robin gives each server its share, within one turn.
func TestTurns(t *testing.T) {
	p := &weightedRoundRobin{poll: poll{b: &sim.Balancer{Live: []int32{0, 1, 2}}}, weight: []float64{1, 2, 4}, turn: make([]float64, 3)}
	counts := [3]int{}
	var offer sim.Offer
	for range 700 {
		offer = sim.Offer{}
		p.Place(nil, &offer)
		counts[offer.Servers[0]]++
	}
	for s, want := range []int{100, 200, 400} {
		if d := counts[s] - want; d < -1 || d > 1 {
			t.Errorf("server %d had %d turns, want %d", s, counts[s], want)
		}
	}
	p.Probed(2, sim.Load{Open: 3, Capacity: 4}) // the weight is now 1
	counts = [3]int{}
	for range 400 {
		offer = sim.Offer{}
		p.Place(nil, &offer)
		counts[offer.Servers[0]]++
	}
	for s, want := range []int{100, 200, 100} {
		if d := counts[s] - want; d < -2 || d > 2 {
			t.Errorf("server %d had %d turns after a poll, want %d", s, counts[s], want)
		}
	}
}

// TestHotOrCold checks Prequal's rule: take the cold server with the lowest latency, or the server
// with the fewest flows if all are hot.
func TestHotOrCold(t *testing.T) {
	p := &prequal{m: &Prequal{Quantile: 0.5}}
	for _, flight := range []int32{1, 2, 3, 4} {
		p.recent[p.seen] = flight
		p.seen++
	}
	if hot := p.hot(); hot != 3 {
		t.Fatalf("more than %d are hot, want 3", hot)
	}
	for _, c := range []struct {
		name        string
		pool        []answer
		best, worst int
	}{
		{"cold by latency", []answer{{flight: 0, latency: 5}, {flight: 3, latency: 1}, {flight: 4, latency: 0}}, 1, 2},
		{"hot by flows", []answer{{flight: 9, latency: 1}, {flight: 5, latency: 7}, {flight: 6, latency: 2}}, 1, 0},
	} {
		p.pool = c.pool
		if got := p.choose(false); got != c.best {
			t.Errorf("%s: answer %d is best, want %d", c.name, got, c.best)
		}
		if got := p.choose(true); got != c.worst {
			t.Errorf("%s: answer %d is worst, want %d", c.name, got, c.worst)
		}
	}
	p.m.Quantile = 1
	p.pool = []answer{{flight: 0, latency: 5}, {flight: 100, latency: 1}}
	if got := p.choose(false); got != 1 {
		t.Errorf("by latency alone answer %d is best, want 1", got)
	}
}

// TestReuse checks that the mean number of uses of an answer keeps the pool full (b_reuse of
// Prequal's section 4). There is no limit if more answers are removed than arrive.
func TestReuse(t *testing.T) {
	m := prequalDefaults()
	p := &prequal{m: m, b: &sim.Balancer{Live: make([]int32, 100), Rand: new(sim.Rand)}}
	sum, n := 0.0, 100_000
	for range n {
		uses := p.reuse()
		if uses != 1 && uses != 2 {
			t.Fatalf("%d uses", uses)
		}
		sum += float64(uses)
	}
	if got, want := sum/float64(n), 2/((1-0.16)*3-1); math.Abs(got-want) > 0.01 {
		t.Errorf("%v uses in the mean, want %v", got, want)
	}
	if m.Remove = 3; p.reuse() < 1_000_000 {
		t.Error("answers are used up though more are removed than come in")
	}
}

// TestPool checks that a use counts the flow, and that the last use removes the answer. In
// addition the oldest and the worst answer are removed in turn.
func TestPool(t *testing.T) {
	p := &prequal{m: prequalDefaults()}
	p.pool = []answer{{server: 1, uses: 2, flight: 3}, {server: 2, uses: 1}}
	if s := p.use(0); s != 1 || p.pool[0].uses != 1 || p.pool[0].flight != 4 {
		t.Errorf("server %d used, left %+v", s, p.pool)
	}
	if s := p.use(1); s != 2 || len(p.pool) != 1 {
		t.Errorf("server %d used, left %+v", s, p.pool)
	}
	p.pool = []answer{{server: 1, latency: 1}, {server: 2, latency: 2}, {server: 3, latency: 9}, {server: 4, latency: 3}}
	for _, want := range [][]int32{{2, 3, 4}, {2, 4}, {4}, {}, {}} {
		p.removeOne()
		left := make([]int32, 0)
		for _, a := range p.pool {
			left = append(left, a.server)
		}
		if !slices.Equal(left, want) {
			t.Fatalf("left %v, want %v", left, want)
		}
	}
}

// TestLatency checks that a server's latency is the median of the latest flows that found the same
// number of flows, or nearly the same.
func TestLatency(t *testing.T) {
	a := &latencyAgent{}
	if got := a.Latency(sim.Load{}); got != 0 {
		t.Errorf("latency %v of nothing", got)
	}
	for i := range 20 { // the last 16 of these are kept
		a.Served(float64(i), 3)
	}
	a.Served(50, 6)
	a.Served(99, 1000)
	for open, want := range map[int32]float64{0: 12, 3: 12, 4: 12, 5: 50, 8: 50, 63: 99, 2000: 99} {
		if got := a.Latency(sim.Load{Open: open}); got != want {
			t.Errorf("latency %v with %d flows, want %v", got, open, want)
		}
	}
}

// TestMarks checks that a flow is counted on the server where it was placed. On a balancer that
// the flow comes to later, it is counted on its present server.
func TestMarks(t *testing.T) {
	var changes []int32
	one := newTally(CountPlaced, func(s int32, by float64) { changes = append(changes, s, int32(by)) })
	two := newTally(CountPlaced, func(s int32, by float64) { changes = append(changes, 100+s, int32(by)) })
	f := &sim.Flow{Server: -1}
	one.placed(f, 65535)
	f.Server = 65535
	one.connected(f)
	if s, connected := one.closed(f); s != 65535 || !connected {
		t.Errorf("server %d, connected %v", s, connected)
	}
	f.Mark = 0 // the flow has moved to another balancer
	two.connected(f)
	two.closed(f)
	if want := []int32{65535, 1, 65535, -1, 65635, 1, 65635, -1}; !reflect.DeepEqual(changes, want) {
		t.Errorf("counted %v, want %v", changes, want)
	}
}

// TestCountsReturnToZero checks that no balancer counts any flow after all flows have ended, for
// all ways of counting.
func TestCountsReturnToZero(t *testing.T) {
	for _, count := range []Count{CountPlaced, CountConnected} {
		var last []sim.Placement
		c := smallConfig(&SED{Own: Own{Candidates: 3, Buckets: 257, Count: count}})
		c.SampleInterval = 1
		c.Sample = func(_ int, _ float64, w sim.World) {
			last = last[:0]
			for b := range w.Balancers() {
				last = append(last, w.Placement(int32(b)))
			}
		}
		result, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1})
		testhost.Must(t, err)
		if result.Runs[0].Recovered == 0 {
			t.Fatal("no flow was found again by another balancer")
		}
		for i, p := range last {
			if i == 1 {
				continue // the balancer has failed
			}
			for s, n := range p.(*byScore).flows {
				if n != 0 {
					t.Errorf("count %s: balancer %d counts %v flows of server %d at the end", count, i, n, s)
				}
			}
		}
	}
}

// Flows that are idle for long leave the count of infer, and all flows leave it at the end.
func TestSilentFlowsDoNotCount(t *testing.T) {
	spec := inferDefaults()
	spec.Silent = 2 * time.Second
	c := smallConfig(spec)
	c.Jobs[0].Idle = sim.Constant(20)
	type count struct{ counted, open int }
	var at50, last count
	c.SampleInterval = 1
	c.Sample = func(_ int, now float64, w sim.World) {
		last = count{}
		for b := range w.Balancers() {
			if b == 1 {
				continue // the balancer fails
			}
			for _, counters := range w.Placement(int32(b)).(*inferring).counters {
				last.counted += int(counters.Established + counters.New)
			}
		}
		for s := range w.Servers() {
			last.open += w.Open(int32(s))
		}
		if now == 50 {
			at50 = last
		}
	}
	if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1}); err != nil {
		t.Fatal(err)
	}
	// Of the 20 s in which a flow is idle, it counts for 2 s.
	if at50.counted < at50.open/20 || at50.counted > at50.open/5 {
		t.Errorf("%d flows count of %d", at50.counted, at50.open)
	}
	if last.counted != 0 {
		t.Errorf("%d flows count at the end", last.counted)
	}
}

// Servers whose idle connections do not count take flows as if they had none.
func TestIdleConnectionsAreIgnored(t *testing.T) {
	mean := func(ignore bool, idle float64) float64 {
		c := smallConfig(nil)
		spec := &Least{
			Hunt: Hunt{Candidates: 8}, Chain: 3, Reports: true, Age: 200 * time.Millisecond,
			IgnoreIdle: ignore,
		}
		var err error
		if c.Placement, c.Policy, err = spec.Build(); err != nil {
			t.Fatal(err)
		}
		c.Jobs[0].Idle, c.Events = sim.Constant(idle), nil
		result, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1})
		testhost.Must(t, err)
		return result.Mean().Value
	}
	without, ignored, counted := mean(false, 0), mean(true, 20), mean(false, 20)
	if ignored > 1.02*without || counted < 1.2*without {
		t.Errorf("means of %.3f s without idle connections, %.3f if they are ignored, %.3f if not",
			without, ignored, counted)
	}
}

// smallConfig is a configuration in which a balancer and a server fail.
func smallConfig(m sim.Method) *sim.Config {
	near := sim.Uniform(0.001, 0.01)
	c := &sim.Config{
		Placement: m, Connections: 3000,
		Jobs:      []sim.Job{{Share: 1, Stages: []sim.Stage{{Queue: sim.CPU, Work: sim.Exponential(0.2)}}}},
		Network:   sim.Network{ClientBalancer: near, BalancerServer: near, ServerClient: near},
		Balancers: []sim.Share{{Weight: 1}, {Weight: 1}, {Weight: 1}},
		Events: []sim.Event{
			{At: 20, Kind: sim.BalancerFail, Balancers: []int32{1}},
			{At: 30, Kind: sim.ServerFail, Servers: []int32{3}, Detect: 1},
		},
	}
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		c.Servers = append(c.Servers, sim.Server{Name: name, CPUs: 2, Speed: 1, Backlog: -1})
	}
	c.Arrivals = sim.Poisson{Rate: c.Rate(0.7)}
	return c
}

// If all servers are equal, SED is LSQ (HLB, section VI-B, figure 12a).
func TestSEDIsLSQForEqualServers(t *testing.T) {
	mean := func(m sim.Method, cpus int32) float64 {
		c := smallConfig(m)
		c.Servers[0].CPUs = cpus
		result, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1})
		testhost.Must(t, err)
		return result.Mean().Value
	}
	own := Own{Ties: TiesFirst}
	if sed, lsq := mean(&SED{Own: own}, 2), mean(&LeastQueue{Own: own}, 2); sed != lsq {
		t.Errorf("means of %v and %v s", sed, lsq)
	}
	if sed, lsq := mean(&SED{Own: own}, 4), mean(&LeastQueue{Own: own}, 4); sed == lsq {
		t.Error("weights do not matter")
	}
}

// TestSpareServersAreUsed checks that a flow reaches servers outside its bucket.
func TestSpareServersAreUsed(t *testing.T) {
	mean := func(spare int) float64 {
		least := &Least{Hunt: Hunt{Candidates: 2}, Reports: true, Age: 200 * time.Millisecond, Spare: spare}
		method, policy, err := least.Build()
		testhost.Must(t, err)
		c := smallConfig(method)
		c.Policy, c.Events = policy, nil
		result, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 2, Parallel: 1})
		testhost.Must(t, err)
		return result.Mean().Value
	}
	if with, without := mean(8), mean(0); with > 0.97*without {
		t.Errorf("%.1f ms with spare servers, %.1f without", 1000*with, 1000*without)
	}
}

// TestNewServerIsNotFlooded checks that a new server is no better than others until the next step.
func TestNewServerIsNotFlooded(t *testing.T) {
	for _, name := range []string{"hlb", "territory-learned"} {
		spec, err := Named(name)
		testhost.Must(t, err)
		method, _, _ := spec.Build()
		c := smallConfig(method)
		c.Servers[7].Absent = true
		c.Events = []sim.Event{{At: 20.1, Kind: sim.ServerAdd, Servers: []int32{7}}}
		all, new := 0, 0
		c.Completed = func(_ int, f sim.Ended) {
			if f.Sent > 20.1 && f.Sent < 20.5 {
				all++
				if f.Server == 7 {
					new++
				}
			}
		}
		if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 8, Parallel: 1}); err != nil {
			t.Fatal(err)
		}
		if new == 0 || new > all/2 {
			t.Errorf("%s: %d of %d flows went to a server that had just come", name, new, all)
		}
	}
}

// TestCountsAfterABalancerComesBack moves flows to a balancer that comes back. They had no entry
// in the flow table of the balancer before, and count as new flows.
func TestCountsAfterABalancerComesBack(t *testing.T) {
	for _, count := range []Count{CountPlaced, CountConnected} {
		negative := 0
		c := smallConfig(&SED{Own: Own{Candidates: 3, Buckets: 257, Count: count}})
		c.Connections, c.FlowTable = 400, sim.FlowTable{Buckets: 8, Ways: 1}
		c.Events = []sim.Event{
			{At: 2, Kind: sim.BalancerFail, Balancers: []int32{1}},
			{At: 2.2, Kind: sim.BalancerAdd, Balancers: []int32{1}},
		}
		c.SampleInterval = 0.01
		c.Sample = func(_ int, _ float64, w sim.World) {
			for b := range w.Balancers() {
				for _, n := range w.Placement(int32(b)).(*byScore).flows {
					if n < 0 {
						negative++
					}
				}
			}
		}
		if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 20, Parallel: 1}); err != nil {
			t.Fatal(err)
		}
		if negative > 0 {
			t.Errorf("count %s: %d times fewer than no flows", count, negative)
		}
	}
}
