// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"slices"
	"testing"
)

// exponential lets flows take an exponential time with a mean, in seconds, and sets the load.
func (w *world) exponential(mean, load float64) {
	w.work = func() float64 { return mean * w.random.ExpFloat64() }
	w.load(load, mean)
}

// TestGroupSlowsDown halves the speed of half of the servers. Their share of new flows must have
// moved half-way within 30 s. Before it is near 1/2, and after it near 1/3.
func TestGroupSlowsDown(t *testing.T) {
	for _, kind := range []Kind{TerritoryLearned, TerritoryConfigured, Durations, DurationsFixed, DurationsMean} {
		w := newWorld(1, kind, 2, sites(16, 2))
		w.exponential(0.2, 0.6)
		group := func(seconds float64) (sum float64) {
			for _, share := range w.run(seconds)[:8] {
				sum += share
			}
			return sum
		}
		w.run(60)
		before := group(60)
		for _, s := range w.sites[:8] {
			s.speed = 0.5
		}
		w.run(20)
		soon := group(20)
		w.run(200)
		late := group(60)
		t.Logf("%s: a share of %.3f before, %.3f from 20 s to 40 s, %.3f late", kind, before, soon, late)
		if before < 0.42 || late > 0.38 || soon > (before+late)/2 {
			t.Errorf("%s: a share of %.3f before, %.3f from 20 s to 40 s, %.3f late", kind, before, soon, late)
		}
	}
}

// lognormal lets flows take a lognormal time, in seconds, and sets the load.
func (w *world) lognormal(mean, deviation, load float64) {
	variance := math.Log(1 + deviation*deviation/mean/mean)
	w.work = func() float64 {
		return mean * math.Exp(math.Sqrt(variance)*w.random.NormFloat64()-variance/2)
	}
	w.load(load, mean)
}

// unequal returns servers with 1, 2, 4 and 8 processors, four of each.
func unequal() (all []*site) {
	for i := range 16 {
		all = append(all, &site{cpus: 1 << (i / 4), speed: 1})
	}
	return all
}

// TestLearnsCapacities checks that the capacities of servers are learned to the next possible
// number or better, also if a sample in three is missing.
func TestLearnsCapacities(t *testing.T) {
	for _, skip := range []float64{0, 1. / 3} {
		w := newWorld(1, TerritoryLearned, 1, unequal())
		w.skip = skip
		w.exponential(0.2, 0.85)
		w.run(300)
		position := func(capacity float64) int { return slices.Index(possible[:], capacity) }
		for s, site := range w.sites {
			got := w.gates[0].estimator.Report(s).Capacity
			if d := position(got) - position(float64(site.cpus)); d < -1 || d > 1 {
				t.Errorf("%.2f missing: capacity %v of %d processors", skip, got, site.cpus)
			}
		}
	}
}

// TestLearnsFromAnyWork compares the durations of flows with learned capacities and with known ones,
// for three distributions of the work that are not exponential.
func TestLearnsFromAnyWork(t *testing.T) {
	for _, deviation := range []float64{0.1, 0.2, 0.6} {
		duration := func(kind Kind) float64 {
			w := newWorld(1, kind, 1, unequal())
			w.lognormal(0.2, deviation, 0.85)
			w.run(100)
			w.run(50)
			return w.stays / w.ended
		}
		learned, known := duration(TerritoryLearned), duration(TerritoryConfigured)
		t.Logf("deviation %v: %.3f s, known: %.3f s", deviation, learned, known)
		if learned > 1.2*known {
			t.Errorf("deviation %v: %.3f s with learned capacities, %.3f s with known ones", deviation,
				learned, known)
		}
	}
}

// TestLearnsSpeeds checks HLB's weights of servers with speeds 1 and 2. Divided by their mean, the
// durations are 4/3 and 2/3, so the ratio of the weights is exp(2/3), which is 1.95. Divided by the
// sum of eight durations, the ratio is exp(2/3/8), which is 1.09.
func TestLearnsSpeeds(t *testing.T) {
	for kind, want := range map[Kind]float64{Durations: 1.087, DurationsFixed: 1.087, DurationsMean: 1.948} {
		for _, deviation := range []float64{0.1, 0.2, 0.6} {
			w := newWorld(1, kind, 1, sites(8, 8))
			for _, s := range w.sites[:4] {
				s.speed = 2
			}
			w.lognormal(0.2, deviation, 0.2)
			w.run(300)
			var sums [2]float64
			for s := range w.sites {
				sums[s/4] += w.gates[0].estimator.Report(s).Weight
			}
			got := sums[0] / sums[1]
			if math.Abs(math.Log(got/want)) > 0.35*math.Log(want) {
				t.Errorf("%s, deviation %v: a ratio of %.3f, want %.3f", kind, deviation, got, want)
			}
		}
	}
}

// TestReservoirIsLikeTheFlows compares the mean of reservoirs with that of all flows, for three
// distributions. The error of a mean of 128 is the deviation divided by the root of 128.
func TestReservoirIsLikeTheFlows(t *testing.T) {
	for _, deviation := range []float64{0.1, 0.2, 0.6} {
		w := newWorld(1, Durations, 1, sites(4, 64))
		w.lognormal(0.2, deviation, 0.2)
		w.run(100)
		for s := range w.sites {
			got := w.gates[0].estimator.Report(s).Duration
			if limit := 3.5 * deviation / math.Sqrt(ReservoirSize); math.Abs(got-0.2) > limit {
				t.Errorf("deviation %v, server %d: a mean of %v, want 0.2 ± %.3f", deviation, s, got, limit)
			}
		}
	}
}

// TestOneServer checks that a server alone gets all flows, whatever was learned.
func TestOneServer(t *testing.T) {
	for _, kind := range Kinds() {
		w := newWorld(1, kind, 2, sites(1, 2))
		w.exponential(0.1, 0.5)
		if share := w.run(30)[0]; share != 1 {
			t.Errorf("%s: a share of %v", kind, share)
		}
		if r := w.gates[0].estimator.Report(0); r.SlowStart*r.NoAnswers*r.SilentFlows != 1 {
			t.Errorf("%s: %+v", kind, r)
		}
	}
}

// TestLittleToDo lets a server be ill while each of the others has about one flow, and hardly anything
// shows how many it could serve. The server must get a part of its share of 1/8, before it is ill,
// and when it is well again.
func TestLittleToDo(t *testing.T) {
	const seeds, fair = 8, 1. / 8
	for _, ill := range []fault{refuses, resets} {
		before, after := 0.0, 0.0
		for seed := range uint64(seeds) {
			w := newWorld(seed, TerritoryLearned, 1, sites(8, 64))
			w.give = 2
			w.exponential(0.5, 10./8/64)
			share := func() float64 {
				w.run(60)
				share := w.run(60)[7]
				if share < fair/4 {
					t.Errorf("%s, seed %d: a share of %.3f", ill, seed, share)
				}
				return share
			}
			before += share() / seeds
			w.sites[7].fault = ill
			w.run(60)
			w.sites[7].fault = healthy
			after += share() / seeds
		}
		t.Logf("%s: shares of %.3f before, %.3f after", ill, before, after)
		if before < fair/2 || after < fair/2 {
			t.Errorf("%s: shares of %.3f before, %.3f after", ill, before, after)
		}
	}
}

// TestSlowStart adds a server to seven with about 20 flows each. Its share must be small at first,
// increase, and be that of the others in the end: one in eight. GSQ2 and HLB as printed have no
// slow start.
func TestSlowStart(t *testing.T) {
	const seeds = 3
	for _, kind := range Kinds() {
		if kind == GSQ2 || kind.isPrinted() {
			continue
		}
		first, middle, last := 0.0, 0.0, 0.0
		for seed := range uint64(seeds) {
			w := newWorld(seed, kind, 1, sites(8, 32))
			w.sites[5].down = true
			w.exponential(1, 0.6)
			w.run(60)
			w.sites[5].down = false
			w.gates[0].estimator.Forget(5)
			first += w.run(2)[5] / seeds
			middle += w.run(4)[5] / seeds
			w.run(4)
			last += w.run(30)[5] / seeds
		}
		t.Logf("%s: shares of %.3f, %.3f and %.3f", kind, first, middle, last)
		if first > 0.07 || middle < first || middle > 0.12 || math.Abs(last-1./8) > 0.025 {
			t.Errorf("%s: shares of %.3f, %.3f and %.3f", kind, first, middle, last)
		}
	}
}

// TestServersLoseProcessors lets servers of 8 processors lose 5 of them. The durations that follow
// must be less than those with a long memory only. docs/research/placement.md shows them.
func TestServersLoseProcessors(t *testing.T) {
	durations := func(contradiction float64) (means [4]float64) {
		const seeds = 3
		for seed := range uint64(seeds) {
			w := newWorld(seed, TerritoryLearned, 1, sites(8, 8))
			w.gates[0].estimator.capacities.contradiction = contradiction
			w.exponential(0.5, 0.6)
			w.run(300)
			for _, s := range w.sites[:4] {
				s.cpus = 3
			}
			for i := range means {
				w.run(30)
				means[i] += 1000 * w.stays / w.ended / seeds
			}
		}
		return means
	}
	with, without := durations(contradiction), durations(math.Inf(1))
	t.Logf("ms: %.0f; with a long memory only: %.0f", with, without)
	if with[1]+with[2]+with[3] > 0.95*(without[1]+without[2]+without[3]) {
		t.Errorf("ms: %.0f; with a long memory only: %.0f", with, without)
	}
}
