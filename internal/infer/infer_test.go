// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestStates goes through figure 4a of HLB, and the transitions that the figure omits.
func TestStates(t *testing.T) {
	for _, c := range []struct {
		name      string
		packets   []Packet
		state     State
		occupancy int32
	}{
		{"a SYN is not counted", []Packet{Open}, Syn, 0},
		{"a repeated SYN is not counted", []Packet{Open, Open}, Syn, 0},
		{"the first packet after the SYN is counted", []Packet{Open, Data}, Conn, 1},
		{"later packets are not counted", []Packet{Open, Data, Data}, Conn, 1},
		{"the end is subtracted", []Packet{Open, Data, End}, Null, 0},
		{"the end of a flow that was not counted", []Packet{Open, End}, Null, 0},
		{"a flow that is not in the table", []Packet{Data, End}, Null, 0},
		{"a second flow of the same 5-tuple", []Packet{Open, Data, End, Open, Data}, Conn, 1},
	} {
		state, occupancy := Null, int32(0)
		for _, p := range c.packets {
			next, change := state.Next(p)
			state, occupancy = next, occupancy+change
		}
		if state != c.state || occupancy != c.occupancy {
			t.Errorf("%s: state %d, occupancy %d, want %d, %d", c.name, state, occupancy, c.state, c.occupancy)
		}
	}
}

// TestOccupancy checks that a flow counts 1 in Conn and 0 in other states, after any packets.
func TestOccupancy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		state, occupancy := Null, int32(0)
		for _, p := range rapid.SliceOf(rapid.SampledFrom([]Packet{Open, Data, End})).Draw(t, "packets") {
			next, change := state.Next(p)
			state, occupancy = next, occupancy+change
			if (occupancy == 1) != (state == Conn) || occupancy < 0 || occupancy > 1 {
				t.Fatalf("state %d, occupancy %d", state, occupancy)
			}
		}
	})
}

func TestReservoir(t *testing.T) {
	var r Reservoir
	if _, ok := r.Mean(); ok {
		t.Error("an empty reservoir has a mean")
	}
	for i := range ReservoirSize {
		// The reservoir is not full, so the random bits have no effect.
		r.Add(float64(i), math.MaxUint64)
	}
	mean := func() float64 { m, _ := r.Mean(); return m }
	if got := mean(); got != 63.5 {
		t.Errorf("mean %v of 0 to 127", got)
	}
	r.Add(128, 0)
	if got := mean(); got != 64.5 {
		t.Errorf("mean %v with 128 instead of 0, want 64.5", got)
	}
	r.Add(0, math.MaxUint64)
	if got := mean(); got != 64.5-127.0/128 {
		t.Errorf("mean %v with 0 instead of 127", got)
	}
}

// TestReservoirForgets checks that a share of (1-1/128)^n is left after n durations. So the
// lifetime of an entry is exponential.
func TestReservoirForgets(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	left, rounds := 0, 2000
	for range rounds {
		var r Reservoir
		for range ReservoirSize {
			r.Add(1, 0)
		}
		for range 200 {
			r.Add(0, random.Uint64())
		}
		mean, _ := r.Mean()
		left += int(mean * ReservoirSize)
	}
	got, want := float64(left)/float64(rounds*ReservoirSize), math.Pow(1-1.0/ReservoirSize, 200)
	if math.Abs(got-want) > 0.005 {
		t.Errorf("%v left, want %v", got, want)
	}
}

// TestFilter compares with numbers computed by hand: P = 1, R = 0.5, mu = 0.5, and two
// measurements of 1.
func TestFilter(t *testing.T) {
	f := Filter{Value: 0.5, Error: 1}
	for i, want := range []struct{ gain, value, variance float64 }{
		{2.0 / 3, 5.0 / 6, 1.0 / 3}, // K = 1 / 1.5
		{2.0 / 5, 9.0 / 10, 1.0 / 5},
		{2.0 / 7, 13.0 / 14, 1.0 / 7},
	} {
		gain := f.Update(1, 0.5)
		if !near(gain, want.gain) || !near(f.Value, want.value) || !near(f.Error, want.variance) {
			t.Errorf("update %d: gain %v, %+v, want %+v", i, gain, f, want)
		}
	}
	f = Filter{Value: 3}
	if gain := f.Update(7, 0); gain != 0 || f.Value != 3 {
		t.Errorf("gain %v to %v though the value is certain", gain, f.Value)
	}
}

func near(a, b float64) bool { return math.Abs(a-b) < 1e-12 }

// TestFilterStaysBetween checks that an estimate stays between its former value and the
// measurement, and that its error decreases.
func TestFilterStaysBetween(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := Filter{Value: rapid.Float64Range(-10, 10).Draw(t, "value"), Error: rapid.Float64Range(0, 10).Draw(t, "error")}
		for range 10 {
			before, z := f, rapid.Float64Range(-10, 10).Draw(t, "measured")
			gain := f.Update(z, rapid.Float64Range(0, 10).Draw(t, "noise"))
			low, high := min(before.Value, z)-1e-9, max(before.Value, z)+1e-9
			if gain < 0 || gain > 1 || f.Value < low || f.Value > high || f.Error < 0 || f.Error > before.Error {
				t.Fatalf("gain %v from %+v by %v to %+v", gain, before, z, f)
			}
		}
	})
}

// TestSpeeds compares with numbers computed by hand. The durations are 1 and 3. Divided by their
// sum, z = 1/4 and 3/4; divided by their mean, 1/2 and 3/2. R = 0.99*0.5 + 0.01*variance of z
// (1/16 and 1/4); K = 1/(1+R); mu = 0.5 + K (z - 0.5).
func TestSpeeds(t *testing.T) {
	for _, c := range []struct {
		options  Options
		z, z2, R float64
	}{
		{Options{Norm: BySum}, 1.0 / 4, 3.0 / 4, 0.495 + 0.01/16},
		{Options{Norm: ByMean}, 1.0 / 2, 3.0 / 2, 0.495 + 0.01/4},
		{Options{Norm: ByMean, FixedNoise: true}, 1.0 / 2, 3.0 / 2, 0.5},
	} {
		s := NewSpeeds(2, c.options)
		s.Observe(0, 1, 0)
		s.Observe(1, 2, 0)
		s.Observe(1, 4, 0)
		s.Step()
		gain := 1 / (1 + c.R)
		a, b := math.Exp(-(0.5 + gain*(c.z-0.5))), math.Exp(-(0.5 + gain*(c.z2-0.5)))
		if !near(s.Weight(0), a/(a+b)) || !near(s.Weight(1), b/(a+b)) {
			t.Errorf("%+v: weights %v, %v, want %v, %v", c.options, s.Weight(0), s.Weight(1), a/(a+b), b/(a+b))
		}
	}
}

func TestUnseen(t *testing.T) {
	for _, norm := range []Norm{BySum, ByMean} {
		weights := func(unseen Unseen) (w [3]float64) {
			s := NewSpeeds(3, Options{Norm: norm, Unseen: unseen})
			s.Observe(0, 1, 0)
			s.Observe(1, 3, 0)
			s.Step()
			return [3]float64{s.Weight(0), s.Weight(1), s.Weight(2)}
		}
		if w := weights(AsAverage); !(w[0] > w[2] && w[2] > w[1]) {
			t.Errorf("norm %d: weights %v: the unseen one is not between the others", norm, w)
		}
		if w := weights(AsZero); !(w[2] > w[0] && w[0] > w[1]) {
			t.Errorf("norm %d: weights %v: the unseen one is not the fastest", norm, w)
		}
	}
	// With the sum of all three durations, z is 1/6, 1/2 and 1/3. R is fixed.
	by := NewSpeeds(3, Options{FixedNoise: true})
	by.Observe(0, 1, 0)
	by.Observe(1, 3, 0)
	by.Step()
	for server, z := range []float64{1. / 6, 1. / 2, 1. / 3} {
		if got, want := by.servers[server].filter.Value, 0.5+(z-0.5)/1.5; !near(got, want) {
			t.Errorf("server %d: %v estimated, want %v", server, got, want)
		}
	}
	s := NewSpeeds(3, Options{})
	s.Step()
	if s.Weight(0) != 1.0/3 {
		t.Errorf("weight %v though nothing was seen", s.Weight(0))
	}
}

// TestWeightsFollowSpeeds checks that weights are positive and add up to 1, that a server with
// shorter flows has a larger weight, up to the bound of ByMean, and that the unit of durations does
// not matter.
func TestWeightsFollowSpeeds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		durations := rapid.SliceOfN(rapid.Float64Range(0.001, 10), 2, 40).Draw(t, "durations")
		o := Options{
			Norm:       rapid.SampledFrom([]Norm{BySum, ByMean}).Draw(t, "norm"),
			FixedNoise: rapid.Bool().Draw(t, "fixed noise"),
		}
		s, scaled := NewSpeeds(len(durations), o), NewSpeeds(len(durations), o)
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			for i, d := range durations {
				s.Observe(int32(i), d, 0)
				scaled.Observe(int32(i), 1000*d, 0)
			}
			s.Step()
			scaled.Step()
		}
		most := math.Inf(1) // of the durations that count as longer than others
		if o.Norm == ByMean {
			most = mostUnequal * slices.Sorted(slices.Values(durations))[(len(durations)-1)/2]
		}
		sum := 0.0
		for i := range durations {
			w := s.Weight(int32(i))
			sum += w
			if !(w > 0) || math.Abs(scaled.Weight(int32(i))-w) > 1e-9 {
				t.Fatalf("weight %v, %v with another unit", w, scaled.Weight(int32(i)))
			}
			for j := range durations {
				if durations[i] < min(durations[j], most)*(1-1e-6) && s.Weight(int32(i)) <= s.Weight(int32(j)) {
					t.Fatalf("durations %v and %v, weights %v and %v", durations[i], durations[j], w, s.Weight(int32(j)))
				}
			}
		}
		if math.Abs(sum-1) > 1e-9 {
			t.Fatalf("weights sum up to %v", sum)
		}
	})
}

// TestPrintedWeightsAreNearlyEqual shows why the norm can be chosen. Of 128 servers, one half is
// twice as fast as the other, and yet the weights of the printed form differ by less than 1%.
func TestPrintedWeightsAreNearlyEqual(t *testing.T) {
	ratio := func(norm Norm) float64 {
		s := NewSpeeds(128, Options{Norm: norm})
		for range 1000 {
			for i := range int32(128) {
				s.Observe(i, float64(1+i%2), 0)
			}
			s.Step()
		}
		return s.Weight(0) / s.Weight(1)
	}
	if got := ratio(BySum); got < 1.003 || got > 1.01 {
		t.Errorf("ratio %v by the sum", got)
	}
	if got := ratio(ByMean); got < 1.8 || got > 2 { // exp(4/3 - 2/3)
		t.Errorf("ratio %v by the mean", got)
	}
}

// TestRanking compares with a search of all scores. Many of the scores are equal.
func TestRanking(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 70).Draw(t, "servers")
		r, scores := NewRanking(n), slices.Repeat([]float64{math.Inf(1)}, n)
		for range rapid.IntRange(0, 60).Draw(t, "changes") {
			i := rapid.IntRange(0, n-1).Draw(t, "server")
			scores[i] = rapid.SampledFrom([]float64{1, 2, 3, 0.5, math.Inf(1)}).Draw(t, "score")
			r.Set(int32(i), scores[i])
		}
		least := slices.Min(scores)
		var want []int32
		var all []uint16
		for i, s := range scores {
			all = append(all, uint16(i))
			if s == least && !math.IsInf(s, 1) {
				want = append(want, int32(i))
			}
		}
		if len(want) == 0 {
			want = []int32{-1}
		}
		for i, w := range want {
			// Random bits in the middle of the range that selects server i.
			random := uint64(float64(1<<63) / float64(len(want)) * (2*float64(i) + 1))
			if got, score := r.Best(random); got != w || score != least {
				t.Fatalf("best %d of %v, want %d of %v", got, score, w, least)
			}
			if got, score := r.BestOf(all, random); got != w || score != least {
				t.Fatalf("best %d of %v among all, want %d of %v", got, score, w, least)
			}
		}
		if got, _ := r.Best(0); got != want[0] {
			t.Fatalf("%d is the first, want %d", got, want[0])
		}
	})
}

func TestChoiceAllocatesNothing(t *testing.T) {
	r := NewRanking(128)
	territory := NewTerritory(slices.Repeat([]float64{1}, 128), Order(members(128), []string{"a"}, make([]int32, 128), 0), 64)
	for i := range int32(128) {
		r.Set(i, 1)
	}
	row := []uint16{3, 1, 4, 15}
	s := int32(0)
	if n := testing.AllocsPerRun(100, func() {
		r.Set(s, Delay(float64(s), 1))
		s, _ = r.Best(1 << 63)
		s, _ = r.BestOf(row, 1<<63)
		territory.Add(s, 1)
		s = territory.Best() + territory.BestOf(row)
		s %= 128
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestGain checks the gains of a filter whose noise is always 1/2 and whose error begins at 1. The
// gain is 1/(n+1/2) in the n-th step, and 0 before the first.
func TestGain(t *testing.T) {
	s := NewSpeeds(2, Options{FixedNoise: true})
	s.Step() // changes nothing, because no flow has ended
	if got := s.Gain(0); got != 0 {
		t.Errorf("gain %v before the first measurement, want 0", got)
	}
	s.Observe(0, 1, 0)
	for n := 1; n <= 5; n++ {
		s.Step()
		for server := range int32(2) {
			if got, want := s.Gain(server), 1/(float64(n)+0.5); math.Abs(got-want) > 1e-12 {
				t.Errorf("step %d, server %d: gain %v, want %v", n, server, got, want)
			}
		}
	}
}
