// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestFaults lets one of eight servers fail in each of four ways. In the minute that begins 3 s
// later, it must get no more than its share of new flows. When it is well, it must get flows again.
func TestFaults(t *testing.T) {
	for _, setup := range []struct {
		name            string
		cpus, balancers int
		mean, load      float64
		give, talk      float64
		kinds           []Kind
	}{
		{"two processors", 2, 2, 0.1, 0.6, 30, 0, []Kind{TerritoryLearned, TerritoryConfigured, Durations, LeastQueue}},
		{"32 processors, impatient clients", 32, 2, 1, 0.6, 5, 0, []Kind{TerritoryLearned, LeastQueue}},
		{"200 processors, long flows", 200, 1, 40, 0.5, 30, 4, []Kind{TerritoryLearned, LeastQueue}},
	} {
		for _, kind := range setup.kinds {
			for _, f := range []fault{refuses, blackhole, resets, mute} {
				w := newWorld(1, kind, setup.balancers, sites(8, setup.cpus))
				w.give, w.talk = setup.give, setup.talk
				w.exponential(setup.mean, setup.load)
				w.run(20 + 3*setup.mean)
				w.sites[3].fault = f
				w.run(3)
				ill := w.run(60)[3]
				w.sites[3].fault = healthy
				w.run(60)
				well := w.run(30)[3]
				least := 0.4 / 8
				if f == mute && w.give < silence {
					least = 0.05 / 8 // it seemed to be slow, and is learned anew slowly
				}
				t.Logf("%s, %s, %s: a share of %.3f", setup.name, kind, f, ill)
				if ill > 1./8 || well < least {
					t.Errorf("%s, %s, %s: a share of %.3f, afterwards %.3f", setup.name, kind, f, ill, well)
				}
			}
		}
	}
}

// beliefs returns what is believed of servers that were well for ten seconds, after some windows
// with the same outcomes.
func beliefs(windows int, of ...outcome) []belief {
	servers := make([]server, len(of))
	pass := func(windows int, now func(i int) outcome) {
		for range windows {
			for i := range servers {
				servers[i].endings.now = now(i)
			}
			judge(servers, func(s *server) *conduct { return &s.endings }, windowTime)
		}
	}
	pass(20, func(int) outcome { return outcome{good: 10} })
	pass(windows, func(i int) outcome { return of[i] })
	list := make([]belief, len(of))
	for i := range servers {
		list[i] = servers[i].endings.belief
	}
	return list
}

func TestFactor(t *testing.T) {
	good := func(n float64) outcome { return outcome{good: n} }
	bad := func(n float64) outcome { return outcome{bad: n} }
	for _, c := range []struct {
		name        string
		windows     int
		of          []outcome
		least, most float64 // limits of the first server's factor
	}{
		{"alone", 20, []outcome{bad(30)}, 1, 1},
		{"nothing is known of others", 20, []outcome{bad(30), {}}, 1, 1},
		{"all are well", 20, []outcome{good(9), good(100)}, 1, 1},
		{"all are ill", 20, []outcome{bad(9), bad(100)}, 1, 1},
		{"one flow", 1, []outcome{bad(1), good(100)}, 1, 1},
		{"one flow in each of six windows", 6, []outcome{bad(1), good(10)}, 20, 64},
		{"many in two windows", 2, []outcome{bad(100), good(100)}, 60, 64},
		{"two of 100", 20, []outcome{{98, 2}, good(100)}, 1, 1},
		{"half", 20, []outcome{{10, 10}, good(100)}, 7, 9},
		// A flood makes all flows rare.
		{"a flood", 2, []outcome{bad(1000), {2, 998}, {2, 998}}, 1, 1},
		// A flood takes the server with the lowest score, and the others get no flows.
		{"a slow flood", 20, []outcome{bad(100), {}, {}}, 1, 1},
		// The flood begins, and the others' flows of this window came before it.
		{"the beginning of a flood", 1, []outcome{bad(600), good(9), good(9)}, 1, 1},
		// The ill servers got nearly all flows, and yet they are not normal.
		{"most are ill", 10, []outcome{bad(100), bad(100), bad(100), good(10)}, 20, 64},
		{"flows that were silent speak", 20, []outcome{{2, -2}, good(10)}, 1, 1},
	} {
		b := beliefs(c.windows, c.of...)[0]
		if got := b.factor(); got < c.least || got > c.most {
			t.Errorf("%s: %v (%+v), want %v to %v", c.name, got, b, c.least, c.most)
		}
	}
}

// TestLaterEventsOutweigh checks that a server that was ill for an hour is well after two flows.
func TestLaterEventsOutweigh(t *testing.T) {
	b := beliefs(7200, outcome{bad: 100}, outcome{good: 100})[0]
	if b.factor() < 60 {
		t.Fatalf("%+v after an hour", b)
	}
	for range 2 {
		b.age(3)
		b.learn(outcome{good: 1}, mostGood)
	}
	if b.factor() > 1 {
		t.Errorf("a factor of %v after two good flows (%+v)", b.factor(), b)
	}
}

// TestLower compares with Wilson's interval for 81 of 263 at two standard deviations, computed by
// hand from the formula of his paper.
func TestLower(t *testing.T) {
	n, p, z := 263.0, 81.0/263, 2.0
	want := (2*n*p + z*z - z*math.Sqrt(z*z+4*n*p*(1-p))) / (2 * (n + z*z))
	if got := (outcome{81, 263 - 81}).lower(); math.Abs(got-want) > 1e-12 {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestBeliefFades(t *testing.T) {
	b := belief{0, 0.9}
	b.age(constancy)
	if want := 0.9/math.E + badPrior*(1-1/math.E); !near(b.ill, want) {
		t.Errorf("%+v, want %v", b, want)
	}
}

// TestAnswersHaveTime checks that a flow is bad after 0.5 s to 1 s, and not before.
func TestAnswersHaveTime(t *testing.T) {
	for _, c := range []struct {
		name     string
		placed   [3]float64
		answered [3]float64
		want     [3]outcome
	}{
		{"at once", [3]float64{10}, [3]float64{10}, [3]outcome{{10, 0}}},
		{"soon", [3]float64{10}, [3]float64{0, 10}, [3]outcome{{}, {10, 0}}},
		{"late", [3]float64{10}, [3]float64{0, 0, 10}, [3]outcome{{}, {0, 10}, {10, 0}}},
		{"never", [3]float64{10}, [3]float64{}, [3]outcome{{}, {0, 10}}},
		{"half", [3]float64{10}, [3]float64{3, 2}, [3]outcome{{3, 0}, {2, 5}}},
		{"later flows", [3]float64{10, 20}, [3]float64{0, 20}, [3]outcome{{}, {20, 10}}},
	} {
		var a answers
		for i := range c.want {
			if a.endWindow(c.placed[i], c.answered[i]); a.now != c.want[i] {
				t.Errorf("%s: window %d: %+v, want %+v", c.name, i, a.now, c.want[i])
			}
		}
	}
}

// TestTrials lets one of eight servers refuse all flows, of which there are so few that no server
// has two at once. It must get less than half of its share. After it is well, it must be known
// within ten seconds.
func TestTrials(t *testing.T) {
	for _, kind := range []Kind{TerritoryLearned, TerritoryConfigured, Durations, LeastQueue} {
		for seed := range uint64(8) {
			w := newWorld(seed, kind, 1, sites(8, 4))
			w.exponential(0.05, 20*0.05/32)
			w.run(20)
			w.sites[3].fault = refuses
			w.run(3)
			ill := w.run(120)[3]
			w.sites[3].fault = healthy
			w.run(10)
			r := w.gates[0].estimator.Report(3)
			if ill > 0.5/8 || r.NoAnswers*r.SilentFlows > 1 {
				t.Errorf("%s, seed %d: a share of %.3f, then %+v", kind, seed, ill, r)
			}
		}
	}
}

// TestSuspectsBeginSlowly checks that a server which is no suspect any more begins a slow start.
func TestSuspectsBeginSlowly(t *testing.T) {
	e := newEstimator(t, LeastQueue, members(2))
	e.servers[0].answers.belief = belief{ill: 0.5}
	e.Step(windowTime, 1)
	if r := e.Report(0); r.NoAnswers*r.SilentFlows == 1 || r.SlowStart > 1 {
		t.Errorf("a suspect: %+v", r)
	}
	e.servers[0].since = events{placed: 2, answered: 2}
	e.Step(windowTime, 1)
	if r := e.Report(0); r.NoAnswers*r.SilentFlows > 1 || r.SlowStart != 1/leastShare {
		t.Errorf("well again: %+v", r)
	}
}

// TestAftermath checks that flows do not count for the capacity of a server that is suspect, nor
// until the flows of the fault have fallen silent, also after a restart of the balancer.
func TestAftermath(t *testing.T) {
	for _, restarts := range []bool{false, true} {
		e := newEstimator(t, TerritoryLearned, members(2))
		e.settings.Silent = 3
		var c Counters
		isCounted := func() bool {
			before := e.capacities.servers[0].ends
			c.Established, c.Placed, c.Answered = 1, c.Placed+1, c.Answered+1
			c.Ended[0]++
			e.Sample(0, c, 0.1)
			return e.capacities.servers[0].ends != before
		}
		e.Sample(0, c, 0)
		if !isCounted() {
			t.Error("an end is not counted")
		}
		e.servers[0].answers.belief, e.servers[0].since = belief{ill: 0.5}, events{}
		e.Step(windowTime, 1)
		if restarts {
			state := e.Save(0)
			e.Forget(0)
			testhost.Must(t, e.Restore(0, state[:], 0))
			e.Sample(0, c, 0)
		}
		if isCounted() {
			t.Error("an end of a suspect is counted")
		}
		e.servers[0].answers.belief = unknown
		for window := range 8 {
			e.servers[0].since = events{placed: 2, answered: 2, left: 2, ended: 2}
			e.Step(windowTime, 1)
			if got, want := isCounted(), window >= 5; got != want {
				t.Errorf("restart %t: %d windows after the suspicion an end is counted: %t", restarts, window, got)
			}
		}
	}
}

// TestIdleServersKeepFewTrials checks that a server without flows collects one trial at most, for
// example because it is drained, whether clients answer or not.
func TestIdleServersKeepFewTrials(t *testing.T) {
	for _, answered := range []float64{0, 100, 100_000} {
		e := newEstimator(t, TerritoryLearned, members(8))
		for range 40 {
			for s := range e.servers[:7] {
				e.servers[s].since = events{placed: 100_000, answered: answered, left: answered, ended: answered}
			}
			e.Step(windowTime, 1)
		}
		if got := e.Trials(7); got > 1 {
			t.Errorf("%v answers: %d trials", answered, got)
		}
	}
}

// TestConfiguredCapacitiesCount checks that a territory with configured capacities keeps to them if
// its servers have little to do: hardly a flow goes to a small server.
func TestConfiguredCapacitiesCount(t *testing.T) {
	list := append(sites(4, 1), sites(4, 8)...)
	w := newWorld(1, TerritoryConfigured, 1, list)
	w.exponential(0.5, 0.1)
	w.run(30)
	small := 0.0
	for _, share := range w.run(60)[:4] {
		small += share
	}
	if small > 0.02 {
		t.Errorf("small servers get %.3f of the flows", small)
	}
}

// TestFlood floods servers with SYNs that nobody answers. No server may seem slower, and capacities
// must stay, whether the flood is slow or fast.
func TestFlood(t *testing.T) {
	for _, kind := range []Kind{TerritoryLearned, TerritoryConfigured, Durations, LeastQueue} {
		for _, flood := range []float64{50, 1000, 5000} {
			w := newWorld(1, kind, 1, sites(8, 4))
			w.exponential(0.5, 0.6)
			w.run(180)
			before := w.capacity()
			w.flood = flood
			w.after(0, w.attack)
			for range 60 {
				w.run(0.5)
				for s := range w.sites {
					if r := w.gates[0].estimator.Report(s); r.NoAnswers*r.SilentFlows > 1 {
						t.Fatalf("%s, %v SYNs per second: at %.1f s: %+v", kind, flood, w.now, r)
					}
				}
			}
			if now := w.capacity(); now < before*0.8 || now > before*1.25 {
				t.Errorf("%s, %v SYNs per second: a mean capacity of %.1f, before %.1f", kind, flood, now, before)
			}
		}
	}
}

// capacity returns the mean capacity of the servers, as the first balancer sees it.
func (w *world) capacity() (mean float64) {
	for s := range w.sites {
		mean += w.gates[0].estimator.Report(s).Capacity / float64(len(w.sites))
	}
	return mean
}
