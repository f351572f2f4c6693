// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"cmp"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
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
	if err != nil {
		b.Fatal(err)
	}
	if err := e.Arrange(members(n), []string{"a", "b", "c", "d"}, "b"); err != nil {
		b.Fatal(err)
	}
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
			if e.UsesDurations() {
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
		if err := e.Arrange(list, []string{"a", "b", "c", "d"}, "b"); err != nil {
			b.Fatal(err)
		}
	}
}
