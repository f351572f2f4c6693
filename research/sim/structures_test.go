// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestEventQueueSorts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q eventQueue
		var model []event
		for range rapid.IntRange(0, 200).Draw(t, "steps") {
			if len(model) == 0 || rapid.Bool().Draw(t, "push") {
				at := float64(rapid.IntRange(0, 20).Draw(t, "at"))
				q.push(at, step, int32(q.created))
				model = append(model, event{at: at, order: q.created, kind: step, index: int32(q.created - 1)})
				continue
			}
			first := 0
			for i := range model {
				if model[i].before(&model[first]) {
					first = i
				}
			}
			if got := q.pop(); got != model[first] {
				t.Fatalf("pop: got %v, want %v", got, model[first])
			}
			model = slices.Delete(model, first, first+1)
		}
	})
}

func TestTournamentFindsTheSmallest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 20).Draw(t, "n")
		tournament := NewTournament(n)
		keys := make([]float64, n)
		for i := range keys {
			keys[i] = math.Inf(1)
		}
		for range 50 {
			i := rapid.IntRange(0, n-1).Draw(t, "i")
			keys[i] = rapid.SampledFrom([]float64{0, 0.5, 1, 2, 1e9, math.Inf(1)}).Draw(t, "key")
			tournament.Set(int32(i), keys[i])
			least := slices.Index(keys, slices.Min(keys))
			if key, index := tournament.Min(); key != keys[least] || int(index) != least {
				t.Fatalf("Min of %v: got %v of %d", keys, key, index)
			}
			if got := tournament.Key(int32(i)); got != keys[i] {
				t.Fatalf("Key(%d): got %v, want %v", i, got, keys[i])
			}
		}
	})
}

func TestCountsFindTheLeast(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 8).Draw(t, "n")
		counts := NewCounts(n)
		model := make([]int32, n)
		var eligible []int32
		for range 100 {
			s := rapid.Int32Range(0, int32(n-1)).Draw(t, "server")
			switch action := rapid.IntRange(0, 9).Draw(t, "action"); {
			case action == 0:
				eligible = nil
				for s := range int32(n) {
					if rapid.Bool().Draw(t, "eligible") {
						eligible = append(eligible, s)
					}
				}
				counts.SetEligible(eligible)
			case action < 6:
				counts.Add(s)
				model[s]++
			case model[s] > 0:
				counts.Remove(s)
				model[s]--
			}
			got := slices.Sorted(slices.Values(counts.Least()))
			if want := leastOf(model, eligible); !slices.Equal(got, want) || counts.Of(s) != model[s] {
				t.Fatalf("least of %v among %v: got %v, want %v", model, eligible, got, want)
			}
		}
	})
}

func leastOf(counts []int32, eligible []int32) []int32 {
	var least []int32
	for _, s := range eligible {
		if len(least) > 0 && counts[s] < counts[least[0]] {
			least = least[:0]
		}
		if len(least) == 0 || counts[s] == counts[least[0]] {
			least = append(least, s)
		}
	}
	return least
}

func TestHistogramQuantiles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float64Range(2e-6, 2e6), 1, 300).Draw(t, "values")
		var whole, left, right Histogram
		for i, x := range values {
			whole.Add(x)
			if i%3 == 0 {
				left.Add(x)
			} else {
				right.Add(x)
			}
		}
		left.Merge(&right)
		slices.Sort(values)
		for _, q := range []float64{0, 0.01, 0.5, 0.9, 0.999, 1} {
			rank := max(int(math.Ceil(q*float64(len(values)))), 1)
			want, got := values[rank-1], whole.Quantile(q)
			if math.Abs(got-want) > 0.004*want {
				t.Fatalf("Quantile(%v): got %v, want %v", q, got, want)
			}
			if merged := left.Quantile(q); merged != got {
				t.Fatalf("Quantile(%v) of merged halves: got %v, want %v", q, merged, got)
			}
		}
		if whole.Min() != values[0] || whole.Max() != values[len(values)-1] || whole.Count() != uint64(len(values)) {
			t.Fatalf("min %v, max %v, count %d of %v", whole.Min(), whole.Max(), whole.Count(), values)
		}
	})
}

func TestHistogramOfNothing(t *testing.T) {
	var h Histogram
	if !math.IsNaN(h.Quantile(0.5)) || !math.IsNaN(h.Mean()) || !math.IsNaN(h.Max()) || !math.IsNaN(h.Below(1)) {
		t.Errorf("without values: median %v, mean %v, max %v", h.Quantile(0.5), h.Mean(), h.Max())
	}
}

func TestHistogramBelow(t *testing.T) {
	var h Histogram
	for i := range 1000 {
		h.Add(float64(i+1) / 100)
	}
	for _, x := range []float64{0.5, 1, 3.3, 9.9} {
		if got := h.Below(x); math.Abs(got-x/10) > 0.005 {
			t.Errorf("Below(%v): got %v, want %v", x, got, x/10)
		}
	}
}

func TestDistributions(t *testing.T) {
	for name, test := range map[string]struct {
		d            Distribution
		mean, median float64
	}{
		"constant":    {Constant(2), 2, 2},
		"exponential": {Exponential(2), 2, 2 * math.Ln2},
		"uniform":     {Uniform(1, 3), 2, 2},
		"lognormal":   {Lognormal(2, 0.5), 2 * math.Exp(0.125), 2},
		"moments":     {LognormalMoments(2, 1), 2, 2 / math.Sqrt(1.25)},
		"pareto":      {Pareto(2, 3), 2, 4. / 3 * math.Cbrt(2)},
		"empirical":   {Empirical([]float64{1, 2, 6}), 3, 2},
	} {
		t.Run(name, func(t *testing.T) {
			const n = 400_000
			r := newRand(5, streamArrivals, 0)
			samples := make([]float64, n)
			sum := 0.0
			for i := range samples {
				samples[i] = test.d.Sample(r.Uint64())
				sum += samples[i]
			}
			slices.Sort(samples)
			for _, bits := range []uint64{0, math.MaxUint64} {
				if x := test.d.Sample(bits); !(x >= 0) || math.IsInf(x, 1) {
					t.Errorf("sample of bits %x: got %v, want a time", bits, x)
				}
			}
			if got := test.d.Mean(); math.Abs(got-test.mean) > 1e-9 {
				t.Errorf("Mean: got %v, want %v", got, test.mean)
			}
			if got := sum / n; math.Abs(got-test.mean) > 0.01*test.mean {
				t.Errorf("mean of samples: got %v, want %v", got, test.mean)
			}
			if got := samples[n/2]; math.Abs(got-test.median) > 0.01*test.median {
				t.Errorf("median of samples: got %v, want %v", got, test.median)
			}
		})
	}
}

func TestLognormalMomentsHasItsDeviation(t *testing.T) {
	d := LognormalMoments(2, 1)
	var h Histogram
	r := newRand(6, streamArrivals, 0)
	for range 400_000 {
		h.Add(d.Sample(r.Uint64()))
	}
	if got := h.Deviation(); math.Abs(got-1) > 0.02 {
		t.Errorf("deviation: got %v, want 1", got)
	}
}

func TestStreamsAreApart(t *testing.T) {
	seen := make(map[uint64]bool)
	for purpose := range 6 {
		for which := range 50 {
			first := newRand(1, purpose, which).Uint64()
			if seen[first] {
				t.Fatalf("stream %d of purpose %d begins as another", which, purpose)
			}
			seen[first] = true
		}
	}
}

func TestBatchesKeepAllValues(t *testing.T) {
	for _, n := range []int{1, 63, 64, 65, 1000, 12345} {
		var b batches
		for i := range n {
			b.add(float64(i))
		}
		means := b.means()
		size := int(max(b.size, 1))
		if len(means) >= mostBatches || len(means)*size+int(b.count) != n {
			t.Fatalf("%d values: %d batches of %d, and %d values", n, len(means), size, b.count)
		}
		for i, mean := range means {
			if want := float64(i*size) + float64(size-1)/2; math.Abs(mean-want) > 1e-9*want {
				t.Fatalf("%d values: mean of batch %d: got %v, want %v", n, i, mean, want)
			}
		}
	}
}

// Half the width of the interval for five values. The t of four degrees of freedom is 2.776, from
// a table.
func TestHalfWidth(t *testing.T) {
	want := 2.776445 * math.Sqrt(2.5) / math.Sqrt(5)
	if got := halfWidth([]float64{1, 2, 3, 4, 5}); math.Abs(got-want) > 1e-6 {
		t.Errorf("got %v, want %v", got, want)
	}
	if got := halfWidth([]float64{1}); !math.IsNaN(got) {
		t.Errorf("of one value: got %v, want NaN", got)
	}
}
