// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestScoreIsTerritory checks that the data path chooses as Territory does. The capacities and the
// waits are those that a price can express. The choices may differ if the scores are equal, because
// Territory divides.
func TestScoreIsTerritory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(t, "servers")
		homes := rapid.IntRange(0, n).Draw(t, "homes")
		order := rapid.Permutation(slices.Collect(func(yield func(int32) bool) {
			for i := range int32(n) {
				if !yield(i) {
					return
				}
			}
		})).Draw(t, "order")
		prices := make([]Price, n)
		capacity := make([]float64, n)
		for at, s := range order {
			unit := 1 / rapid.Float64Range(0.5, 40).Draw(t, "capacity")
			if rapid.Bool().Draw(t, "whole") {
				unit = 1 / possible[rapid.IntRange(0, len(possible)-1).Draw(t, "possible")]
			}
			extra := 0.0
			if at >= homes {
				extra = rapid.Float64Range(0, 3).Draw(t, "wait")
			}
			p := NewPrice(unit, extra, at, at >= homes)
			if low, high := unit*PriceOne-1, unit*PriceOne; float64(p.Unit) <= low || float64(p.Unit) > high {
				t.Fatalf("unit %d, want %v to %v", p.Unit, low, high)
			}
			prices[s], capacity[s] = p, PriceOne/float64(p.Unit)
		}
		territory := NewTerritory(capacity, order, homes)
		for s, p := range prices {
			territory.SetWait(int32(s), float64(p.Extra)/PriceOne)
		}
		flows := make([]uint32, n)
		score := func(s int32) uint64 { return prices[s].Score(flows[s], 0, uint16(s)) }
		for range rapid.IntRange(1, 60).Draw(t, "flows") {
			best := slices.MinFunc(order, func(a, b int32) int { return cmp.Compare(score(a), score(b)) })
			want := territory.Best()
			if score(best)>>28 != score(want)>>28 {
				t.Fatalf("server %d, want %d; flows %v, prices %v", best, want, flows, prices)
			}
			flows[want]++
			territory.Add(want, 1)
		}
	})
}

func TestScoreLimits(t *testing.T) {
	for _, c := range []struct {
		name  string
		price Price
		est   uint32
		fresh uint32
		want  uint64
	}{
		{"full", NewPrice(1./3, 0, 0, false), 2, 0, 65535},
		{"away", NewPrice(1./3, 0, 0, true), 2, 0, 65535 + PriceOne},
		{"away and waiting", NewPrice(1, 0.5, 0, true), 0, 0, 5 * PriceOne / 2},
		{"new flows", NewPrice(1, 0, 0, false), 1, 16, 19 * PriceOne},
		{"a flood of new flows", NewPrice(1, 0, 0, false), 1, 16 + 640, 29 * PriceOne},
		{"largest", NewPrice(math.Inf(1), math.Inf(1), 0, false), math.MaxUint32, 0, mostDelay},
		{"no number", NewPrice(math.NaN(), -1, 0, false), 0, 0, math.MaxUint32 + PriceOne},
		{"smallest", NewPrice(0, 0, 0, false), 0, 0, 1},
	} {
		if got := c.price.Score(c.est, c.fresh, 0) >> 28; got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	p := NewPrice(1, 0, 5000, false)
	if got := p.Score(0, 0, 7); got != PriceOne<<28|4095<<16|7 {
		t.Errorf("position and slot: %x", got)
	}
}

// busy returns the estimator of many servers which each had up to 32 flows, and the next counters.
func busy(b *testing.B, kind Kind, n int) (*Estimator, []Counters) {
	e, err := NewEstimator(Settings{Kind: kind, SlowStart: DefaultSlowStart})
	testhost.Must(b, err)
	testhost.Must(b, e.Arrange(members(n), []string{"a", "b", "c", "d"}, "b"))
	counters := make([]Counters, n)
	for round := range MostServed + 1 {
		for s := range counters {
			c := &counters[s]
			e.Sample(s, *c, 0.02)
			c.Established = uint32(round + 1)
			c.Placed, c.Answered = c.Placed+2, c.Answered+2
			c.Ended[round%MostServed] += 2
		}
	}
	return e, counters
}

// BenchmarkStep has 10,000 servers, as for one service at once.
func BenchmarkStep(b *testing.B) {
	for _, kind := range Kinds() {
		b.Run(string(kind), func(b *testing.B) {
			e, _ := busy(b, kind, 10000)
			if e.Timing() != TimingNone {
				durations := slices.Repeat([]float64{0.1}, ReservoirSize)
				for s := range 10000 {
					e.Observe(s, durations)
				}
			}
			for b.Loop() {
				e.Step(0.5, 1)
			}
		})
	}
}

func BenchmarkSample(b *testing.B) {
	e, counters := busy(b, TerritoryLearned, 10000)
	for b.Loop() {
		for s := range counters {
			c := &counters[s]
			c.Placed++
			c.Ended[0]++
			e.Sample(s, *c, 0.02)
		}
	}
}

func BenchmarkArrange(b *testing.B) {
	e, _ := busy(b, TerritoryLearned, 10000)
	list := members(10000)
	for b.Loop() {
		testhost.Must(b, e.Arrange(list, []string{"a", "b", "c", "d"}, "b"))
	}
}

func newEstimator(t *testing.T, kind Kind, members []WeightedServer, balancers ...string) *Estimator {
	t.Helper()
	e, err := NewEstimator(Settings{Kind: kind, SlowStart: DefaultSlowStart})
	testhost.Must(t, err)
	self := ""
	if len(balancers) > 0 {
		self = balancers[0]
	}
	testhost.Must(t, e.Arrange(members, balancers, self))
	return e
}

// teach lets a server have 1 to 8 flows, as if it had a number of processors, and serve each in a
// second. Its durations are 1 s / processors.
func teach(e *Estimator, server, processors int) {
	var c Counters
	e.Sample(server, c, 0)
	for n := 1; n <= 8; n++ {
		served := uint32(100 * min(n, processors))
		c.Established = uint32(n)
		c.Placed, c.Answered = c.Placed+served, c.Answered+served
		c.Ended[n-1] += served
		e.Sample(server, c, 100)
	}
	e.Observe(server, []float64{1 / float64(processors)})
}

// TestManyServers checks that the capacities, speeds and prices of 10,000 servers are as right as
// those of few.
func TestManyServers(t *testing.T) {
	const n = 10_000
	capacity := func(s int) int { return 1 << (s % 3) }
	for _, kind := range []Kind{TerritoryLearned, DurationsMean} {
		e := newEstimator(t, kind, members(n), "b0", "b1", "b2", "b3")
		for s := range n {
			teach(e, s, capacity(s))
		}
		for range 20 {
			e.Step(0.5, 1)
		}
		positions, homes := map[uint16]int{}, 0
		for s := range n {
			r, p := e.Report(s), e.Price(s)
			isRight := r.Capacity == float64(capacity(s))
			if kind == DurationsMean {
				isRight = math.Abs(r.Weight-e.Report(s%3).Weight) < 1e-9 && (s%3 == 0 || r.Weight > 1.2*e.Report(s%3-1).Weight)
			}
			if !isRight || p.Position >= Positions || p.Unit != e.Price(s%3).Unit {
				t.Fatalf("%s: server %d: %+v, %+v", kind, s, r, p)
			}
			positions[p.Position]++
			if !p.Away {
				homes++
			}
		}
		most := slices.Max(slices.Collect(maps.Values(positions)))
		if len(positions) != Positions || most > n/Positions+1 {
			t.Errorf("%s: %d positions, one of %d servers", kind, len(positions), most)
		}
		if kind == TerritoryLearned && (homes < n/4*9/10 || homes > n/4*11/10) {
			t.Errorf("%d of %d servers have their home here", homes, n)
		}
	}
}

func TestUnits(t *testing.T) {
	list := []WeightedServer{{"a", 1}, {"b", 2}, {"c", 4}, {"d", 0}}
	// HLB's z are 4/7, 2/7 and 1/7 of the sum; d counts as the average, 1/3 of 7/4.
	for kind, want := range map[Kind][3]float64{
		TerritoryLearned:    {1, 1. / 2, 1. / 4},
		TerritoryConfigured: {1, 1. / 2, 1. / 4},
		LeastQueue:          {1, 1, 1},
		SED:                 {1, 1. / 2, 1. / 4},
	} {
		e := newEstimator(t, kind, list)
		for s, processors := range []int{1, 2, 4} {
			teach(e, s, processors)
		}
		e.Step(0.5, 1)
		for s, unit := range want {
			if got := float64(e.Price(s).Unit) / PriceOne; math.Abs(got-unit) > 1e-3 {
				t.Errorf("%s: server %d has the unit %v, want %v", kind, s, got, unit)
			}
		}
		if got := e.Price(3).Unit; got != math.MaxUint32 {
			t.Errorf("%s: a server of weight 0 has the unit %d", kind, got)
		}
	}
	for _, kind := range []Kind{Durations, DurationsFixed, DurationsMean} {
		e := newEstimator(t, kind, list[:3])
		for s, processors := range []int{1, 2, 4} {
			teach(e, s, processors)
		}
		e.Step(0.5, 1)
		a, b, c := e.Price(0).Unit, e.Price(1).Unit, e.Price(2).Unit
		if mean := 3 / (1/float64(a) + 1/float64(b) + 1/float64(c)); !(a > b && b > c) || math.Abs(mean/PriceOne-1) > 1e-3 {
			t.Errorf("%s: units %d, %d, %d", kind, a, b, c)
		}
	}
}

// TestEqualDelays checks that rounding does not make equal delays of SED unequal. With the next
// flow, the number of flows of each server is in proportion to its weight.
func TestEqualDelays(t *testing.T) {
	for _, weights := range [][]float64{
		{1, 2, 4}, {10, 20}, {3, 4, 0}, {7, 5, 3}, {997, 991}, {1, 1000}, {0.5, 1, 2}, {60, 120, 900},
	} {
		var list []WeightedServer
		for i, w := range weights {
			list = append(list, WeightedServer{string(rune('a' + i)), w})
		}
		e := newEstimator(t, SED, list)
		least := slices.MinFunc(weights, func(a, b float64) int {
			return cmp.Compare(cmp.Or(a, math.Inf(1)), cmp.Or(b, math.Inf(1)))
		})
		for _, flows := range []float64{1, 2, 50} {
			first := e.Price(0).Score(uint32(4*flows*weights[0]-1), 0, 0) >> 28
			for s, w := range weights {
				if score := e.Price(s).Score(uint32(4*flows*w-1), 0, 0) >> 28; w > 0 && score != first {
					t.Errorf("weights %v: server %d has the delay %d, want %d", weights, s, score, first)
				}
			}
			if got := float64(first-PriceOne) / PriceOne / (4 * flows * least); math.Abs(got-1) > 0.02 {
				t.Errorf("weights %v: the unit of the least is %v, want 1", weights, got)
			}
		}
	}
	if got := numerator([]WeightedServer{{"a", 997}, {"b", 991}, {"c", 983}}); got != 983 {
		t.Errorf("weights without a common multiple: %v, want the least", got)
	}
}

// TestTies checks that random bits decide between servers of HLB, and homes between those of a
// territory.
func TestTies(t *testing.T) {
	positions := func(kind Kind, random uint64) (list []uint16) {
		e := newEstimator(t, kind, members(20), "x", "y")
		e.Step(0.5, random)
		for s := range 20 {
			list = append(list, e.Price(s).Position)
		}
		return list
	}
	for _, kind := range Kinds() {
		one, same, other := positions(kind, 1), positions(kind, 1), positions(kind, 2)
		if !slices.Equal(one, same) {
			t.Errorf("%s: the same bits give other positions", kind)
		}
		territory := kind == TerritoryLearned || kind == TerritoryConfigured
		if slices.Equal(one, other) != territory {
			t.Errorf("%s: positions %v and %v", kind, one, other)
		}
		if sorted := slices.Sorted(slices.Values(one)); len(slices.Compact(sorted)) != 20 {
			t.Errorf("%s: positions %v", kind, one)
		}
	}
	e := newEstimator(t, TerritoryLearned, members(20), "x", "y")
	for s := range 20 {
		if p := e.Price(s); p.Away != (p.Position >= 10) {
			t.Errorf("server %d: away %v, position %d", s, p.Away, p.Position)
		}
	}
	e = newEstimator(t, LeastQueue, members(10000))
	e.Step(0.5, 1)
	count := map[uint16]int{}
	for s := range 10000 {
		if count[e.Price(s).Position]++; count[e.Price(s).Position] > 3 {
			t.Fatalf("%d of 10,000 servers have the position %d", 4, e.Price(s).Position)
		}
	}
}

// TestArrange checks that what was learned follows the names.
func TestArrange(t *testing.T) {
	for _, kind := range Kinds() {
		e := newEstimator(t, kind, members(3), "x")
		for s, processors := range []int{1, 2, 4} {
			teach(e, s, processors)
		}
		e.Step(0.5, 1)
		before := []Price{e.Price(0), e.Price(1), e.Price(2)}
		value := 0.0
		if e.speeds != nil {
			value = e.speeds.servers[2].filter.Value
		}
		arrange := func(list []WeightedServer, balancers ...string) {
			t.Helper()
			testhost.Must(t, e.Arrange(list, balancers, "x"))
		}
		list := members(5)
		arrange([]WeightedServer{list[2], list[3], list[1], list[4]}, "x")
		if s := e.speeds; s != nil && s.options.Norm == BySum {
			if got, want := s.servers[0].filter.Value, value*3/4; !near(got, want) {
				t.Errorf("%s: with four servers for three, %v is estimated, want %v", kind, got, want)
			}
		}
		if e.Price(0).Unit != before[2].Unit || e.Price(2).Unit != before[1].Unit {
			t.Errorf("%s: units %d and %d, were %d and %d", kind, e.Price(0).Unit, e.Price(2).Unit,
				before[2].Unit, before[1].Unit)
		}
		if r := e.Report(1); e.capacities == nil && !kind.isPrinted() && r.SlowStart != 16 {
			t.Errorf("%s: a new server: %+v", kind, r)
		}
		arrange(members(3), "x") // server 0 has been away
		if e.Report(0).Duration != 0 || e.Price(1).Unit != before[1].Unit {
			t.Errorf("%s: server 0 %+v, the unit of server 1 %d, was %d", kind, e.Report(0),
				e.Price(1).Unit, before[1].Unit)
		}
		arrange(members(3), "x", "y", "z")
		for s := 1; s < 3; s++ {
			if e.Price(s).Unit != before[s].Unit {
				t.Errorf("%s: with three balancers server %d has the unit %d, had %d", kind, s,
					e.Price(s).Unit, before[s].Unit)
			}
		}
		arrange(nil)
		e.Step(0.5, 1)
	}
}

func TestErrors(t *testing.T) {
	for _, s := range []Settings{{}, {Kind: "best"}, {Kind: Durations, SlowStart: -1}, {Kind: Durations, SlowStart: math.Inf(1)}} {
		if _, err := NewEstimator(s); err == nil {
			t.Errorf("%+v: no error", s)
		}
	}
	for name, c := range map[string]struct {
		list      []WeightedServer
		balancers []string
	}{
		"names":          {[]WeightedServer{{"a", 1}, {"a", 1}}, nil},
		"negative":       {[]WeightedServer{{"a", -1}}, nil},
		"no number":      {[]WeightedServer{{"a", math.NaN()}}, nil},
		"no self":        {members(2), []string{"x"}},
		"balancer twice": {members(2), []string{"self", "x", "x"}},
	} {
		e := newEstimator(t, TerritoryLearned, members(1))
		if err := e.Arrange(c.list, c.balancers, "self"); err == nil || len(e.servers) != 1 {
			t.Errorf("%s: error %v, %d servers", name, err, len(e.servers))
		}
	}
}

// TestCounters checks differences of counters.
func TestCounters(t *testing.T) {
	sample := func(list ...Counters) (events, *record) {
		e := newEstimator(t, TerritoryLearned, members(1))
		for _, c := range list {
			e.Sample(0, c, 1)
		}
		return e.servers[0].since, &e.capacities.servers[0].record
	}
	ended := func(n uint32) (list [MostServed]uint32) {
		list[1] = n
		return list
	}
	const most = math.MaxUint32
	for name, c := range map[string]struct {
		list []Counters
		want events
		two  tenure // of two flows
	}{
		"first":    {[]Counters{{Placed: 7, Answered: 6, Established: 2, Ended: ended(4)}}, events{}, tenure{}},
		"increase": {[]Counters{{}, {Placed: 7, Answered: 6, New: 1, Established: 2, Ended: ended(4)}}, events{7, 6, 4, 4}, tenure{1, 4}},
		"wrap": {[]Counters{{Placed: most, Answered: most - 1, Ended: ended(most)}, {Placed: 1, Answered: 0, Ended: ended(0)}},
			events{2, 2, 2, 1}, tenure{0, 1}},
		"restart":           {[]Counters{{Placed: 100, Answered: 100, Ended: ended(90)}, {Placed: 5, Answered: 4, Ended: ended(3)}}, events{5, 4, 4, 3}, tenure{0, 3}},
		"restart of ended":  {[]Counters{{Placed: 5, Answered: 4, Ended: ended(90)}, {Placed: 5, Answered: 4, Ended: ended(3)}}, events{5, 4, 4, 3}, tenure{0, 3}},
		"ends of new flows": {[]Counters{{}, {Placed: 7, Answered: 7, Established: 2, EndedNew: 5}}, events{7, 7, 5, 5}, tenure{1, 0}},
		"below 0":           {[]Counters{{}, {Established: most}}, events{}, tenure{}},
	} {
		since, r := sample(c.list...)
		if since != c.want || r.having[2] != c.two {
			t.Errorf("%s: %+v, %+v, want %+v, %+v", name, since, r.having[2], c.want, c.two)
		}
	}
}

// TestRestart checks that a server that is back keeps what was learned, and that one that was
// replaced does not.
func TestRestart(t *testing.T) {
	for _, kind := range []Kind{TerritoryLearned, Durations} {
		e := newEstimator(t, kind, members(2))
		teach(e, 0, 4)
		teach(e, 1, 4)
		e.Step(0.5, 1)
		normal := e.Price(0)
		e.Restart(0)
		if r := e.Report(0); r.SlowStart < 3 || r.Duration == 0 || r.NoAnswers*r.SilentFlows != 1 || e.Price(0).Unit <= normal.Unit {
			t.Errorf("%s: %+v, price %v", kind, r, e.Price(0))
		}
		for range 20 {
			e.Step(0.5, 1)
		}
		if got := e.Price(0); got.Unit != normal.Unit {
			t.Errorf("%s: a unit of %d after the slow start, had %d", kind, got.Unit, normal.Unit)
		}
		e.Forget(0)
		if r := e.Report(0); r.Duration != 0 {
			t.Errorf("%s: %+v is not forgotten", kind, r)
		}
	}
}

// TestSaved checks that what was learned survives a restart.
func TestSaved(t *testing.T) {
	for _, kind := range Kinds() {
		old, now := newEstimator(t, kind, members(3)), newEstimator(t, kind, members(3))
		for s, processors := range []int{1, 2, 4} {
			teach(old, s, processors)
		}
		for range 3 {
			old.Step(0.5, 1)
		}
		old.servers[2].endings.belief = belief{half: 0.1, ill: 0.05}
		for s := range 3 {
			now.Restart(s)
			now.Observe(s, []float64{1 / float64(int(1)<<s)})
			state := old.Save(s)
			testhost.Must(t, now.Restore(s, state[:], 0))
			if got, want := int64(now.Price(s).Unit), int64(old.Price(s).Unit); got < want-2 || got > want+2 {
				t.Errorf("%s: server %d has the unit %d, had %d", kind, s, got, want)
			}
		}
		for _, e := range []*Estimator{old, now} {
			e.Step(0.5, 1)
		}
		for s := range 3 {
			belief, before := now.servers[s].endings.belief, old.servers[s].endings.belief
			if math.Abs(belief.ill-before.ill)+math.Abs(belief.half-before.half) > 1e-6 {
				t.Errorf("%s: server %d: %+v, was %+v", kind, s, belief, before)
			}
			got, want := now.Report(s), old.Report(s)
			if math.Abs(got.Capacity-want.Capacity)+math.Abs(got.Weight-want.Weight)+math.Abs(got.SilentFlows-want.SilentFlows) > 0.01 {
				t.Errorf("%s: server %d: %+v, was %+v", kind, s, got, want)
			}
		}
	}
}

// TestStateSize checks that the control loop's map has room for a state.
func TestStateSize(t *testing.T) {
	if StateSize > 1024 {
		t.Errorf("a state has %d bytes", StateSize)
	}
}

// TestSavedForOtherNumber checks that the durations in a state stay in proportion if the service
// has more servers after a restart, although HLB divides them by their sum, and that the kinds
// that use durations do not take each other's states.
func TestSavedForOtherNumber(t *testing.T) {
	fixed := newEstimator(t, DurationsFixed, members(2))
	fixed.Step(0.5, 1)
	state := fixed.Save(0)
	four := newEstimator(t, DurationsFixed, members(4))
	if err := four.Restore(0, state[:], 0); err != nil || four.speeds.noise != initialNoise {
		t.Errorf("durations-fixed has the noise %v: %v", four.speeds.noise, err)
	}

	old, now := newEstimator(t, Durations, members(2)), newEstimator(t, Durations, members(4))
	for _, list := range [][]WeightedServer{nil, members(2)} {
		if err := old.Arrange(list, nil, ""); err != nil || old.speeds.noise != initialNoise {
			t.Errorf("with %d servers, a noise of %v: %v", len(list), old.speeds.noise, err)
		}
	}
	for s, processors := range []int{1, 3} {
		teach(old, s, processors)
	}
	old.Step(0.5, 1)
	for s := range 2 {
		state := old.Save(s)
		testhost.Must(t, now.Restore(s, state[:], 0))
		before, after := old.speeds.servers[s].filter, now.speeds.servers[s].filter
		if math.Abs(2*after.Value-before.Value) > 1e-6 || math.Abs(4*after.Error-before.Error) > 1e-6 {
			t.Errorf("server %d: %+v of four, was %+v of two", s, after, before)
		}
		for _, kind := range []Kind{DurationsFixed, DurationsMean, HLB, HLBFixed} {
			if err := newEstimator(t, kind, members(2)).Restore(s, state[:], 0); err == nil {
				t.Errorf("%s takes a state of durations", kind)
			}
		}
	}

	// More servers without a restart have the same effect.
	testhost.Must(t, old.Arrange(members(4), nil, ""))
	for s := range 2 {
		reloaded, restarted := old.speeds.servers[s].filter, now.speeds.servers[s].filter
		if math.Abs(reloaded.Value-restarted.Value)+math.Abs(reloaded.Error-restarted.Error) > 1e-6 {
			t.Errorf("server %d: %+v after a reload, %+v after a restart", s, reloaded, restarted)
		}
	}
	if math.Abs(old.speeds.noise-now.speeds.noise) > 1e-6 {
		t.Errorf("a noise of %v after a reload, %v after a restart", old.speeds.noise, now.speeds.noise)
	}
}

// TestSavedFades checks that an old state counts less.
func TestSavedFades(t *testing.T) {
	e := newEstimator(t, TerritoryLearned, members(1))
	teach(e, 0, 4)
	e.servers[0].answers.ill = 0.9
	state := e.Save(0)
	testhost.Must(t, e.Restore(0, state[:], memory))
	got, want := e.capacities.servers[0].ends, (100+200+300+5*400)/math.E
	if math.Abs(got-want) > 1 || math.Abs(e.servers[0].answers.ill-badPrior) > 1e-3 {
		t.Errorf("%v ends, want %v; %+v", got, want, e.servers[0].answers)
	}
	h := newEstimator(t, Durations, members(2))
	teach(h, 0, 1)
	teach(h, 1, 2)
	h.Step(0.5, 1)
	state = h.Save(0)
	if err := h.Restore(0, state[:], 100*memory); err != nil || !near(h.speeds.servers[0].filter.Error, initialError) {
		t.Errorf("error %v, %+v", err, h.speeds.servers[0].filter)
	}
}

func TestRestoreErrors(t *testing.T) {
	e := newEstimator(t, TerritoryLearned, members(1))
	teach(e, 0, 4)
	e.Step(0.5, 1)
	good, price := e.Save(0), e.Price(0)
	change := func(at int, to byte) []byte {
		state := good
		state[at] = to
		return state[:]
	}
	other := newEstimator(t, Durations, members(1)).Save(0)
	for name, state := range map[string][]byte{
		"version": change(0, stateVersion+1), "kind": other[:], "short": good[:StateSize-1], "empty": nil,
		"negative": change(7, 0x80|0x3f), "no number": change(7, 0x7f),
	} {
		if name == "no number" {
			state[6] = 0xc0
		}
		if err := e.Restore(0, state, 0); err == nil || e.Price(0) != price {
			t.Errorf("%s: error %v, price %v", name, err, e.Price(0))
		}
	}
	if err := e.Restore(0, good[:], -1); err == nil {
		t.Error("a negative age")
	}
}

func TestReport(t *testing.T) {
	e := newEstimator(t, TerritoryConfigured, []WeightedServer{{"a", 4}, {"b", 4}}, "x")
	teach(e, 0, 4)
	e.servers[1].endings.belief = belief{half: 0.5, ill: 0.25}
	e.servers[1].answers.belief = belief{ill: 0.95}
	e.Restart(1)
	e.Step(0.5, 1)
	if r := e.Report(0); r.Capacity != 4 || r.Duration != 1 || r.SlowStart*r.NoAnswers*r.SilentFlows != 1 {
		t.Errorf("%+v", r)
	}
	r := e.Report(1)
	if r.SlowStart != 4 || r.NoAnswers < 20 || r.SilentFlows <= 1 || r.SilentFlows >= r.NoAnswers {
		t.Errorf("%+v", r)
	}
}

// TestAway checks that only servers of other balancers have an extra delay: the inferred wait.
func TestAway(t *testing.T) {
	e := newEstimator(t, TerritoryLearned, members(8), "x", "y")
	for s := range 8 {
		teach(e, s, 2)
	}
	e.Step(0.5, 1)
	for s := range 8 {
		p, wait := e.Price(s), e.Report(s).Wait
		if wait < 0.5 || p.Away != e.Report(s).Away || p.Away != (p.Extra == fixed(wait)) || !p.Away && p.Extra != 0 {
			t.Errorf("server %d: a wait of %v, price %+v", s, wait, p)
		}
	}
}

// TestHomesByWeight checks that configured weights decide how many servers have their home here,
// and that they do not if capacities are learned.
func TestHomesByWeight(t *testing.T) {
	list := members(40)
	for s := range 20 {
		list[s].Weight = 19
	}
	for kind, even := range map[Kind]bool{TerritoryLearned: true, TerritoryConfigured: false} {
		at := newEstimator(t, kind, list, "x", "y", "z", "u")
		weight := 0.0
		for _, s := range at.home {
			weight += list[s].Weight
		}
		if (len(at.home) == 10) != even || !even && math.Abs(weight-100) > 19 {
			t.Errorf("%s: %d home servers of weight %v", kind, len(at.home), weight)
		}
	}
}
