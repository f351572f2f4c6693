// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"testing"
)

// TestFaults lets one of eight servers fail in each of four ways. In the minute from 3 s after that
// on, it must get no more than its share of new flows. After it is well it must get flows again.
func TestFaults(t *testing.T) {
	for _, setup := range []struct {
		name            string
		cpus, balancers int
		mean, load      float64
		give, talk      float64
	}{
		{"two processors", 2, 2, 0.1, 0.6, 30, 0},
		{"32 processors, impatient clients", 32, 2, 1, 0.6, 5, 0},
		{"200 processors, long flows", 200, 1, 40, 0.5, 30, 4},
	} {
		for _, kind := range []Kind{TerritoryLearned, TerritoryConfigured, HLB, LeastQueue} {
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
					least = 0.1 / 8 // it seemed to be slow, and is learned anew slowly
				}
				t.Logf("%s, %s, %s: a share of %.3f", setup.name, kind, f, ill)
				if ill > 1./8 || well < least {
					t.Errorf("%s, %s, %s: a share of %.3f, afterwards %.3f", setup.name, kind, f, ill, well)
				}
			}
		}
	}
}

// suspect returns servers with evidence, judged.
func suspect(evidences ...evidence) []server {
	servers := make([]server, len(evidences))
	for i, e := range evidences {
		servers[i].endings = e
	}
	judge(servers, func(s *server) *evidence { return &s.endings })
	return servers
}

func TestJudge(t *testing.T) {
	all := func(n float64) evidence { return evidence{events: n, good: n} }
	none := func(n float64) evidence { return evidence{events: n} }
	for _, c := range []struct {
		name        string
		of          []evidence
		least, most float64 // limits of the first server's factor
	}{
		{"alone", []evidence{none(30)}, 1, 1},
		{"nothing is known of others", []evidence{none(30), {}}, 1, 1},
		{"all are well", []evidence{all(9), all(100)}, 1, 1},
		{"all are ill", []evidence{none(9), none(100)}, 1, 1},
		{"one bad event", []evidence{none(1), all(100)}, 1.5, 1.6}, // (1 + 1/2.5^2)^3
		{"three", []evidence{none(3), all(100)}, 3.2, 3.3},         // (1 + 3/2.5^2)^3
		{"many", []evidence{none(100), all(100)}, 64, 64},
		{"two of 100", []evidence{{events: 100, good: 98}, all(100)}, 1, 1.05},
		{"half", []evidence{{events: 100, good: 50}, all(100)}, 3, 6},
		// With floods the others are not well either.
		{"a flood", []evidence{{events: 100, good: 10}, {events: 1000, good: 130}}, 1, 1},
		// The ill servers got nearly all flows, and yet they are not normal.
		{"most are ill", []evidence{none(100), none(100), none(100), all(10)}, 20, 64},
	} {
		if got := suspect(c.of...)[0].endings.factor; got < c.least || got > c.most {
			t.Errorf("%s: %v, want %v to %v", c.name, got, c.least, c.most)
		}
	}
}

// TestUpper compares with Wilson's interval for 81 of 263 at 2.5 standard deviations, computed by
// hand from the formula of his paper.
func TestUpper(t *testing.T) {
	n, p, z := 263.0, 81.0/263, 2.5
	want := (2*n*p + z*z + z*math.Sqrt(z*z+4*n*p*(1-p))) / (2 * (n + z*z))
	e := evidence{events: 263, good: 81}
	if got := e.upper(); math.Abs(got-want) > 1e-12 {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestEvidenceFades(t *testing.T) {
	for _, n := range []float64{1, 30, 1000} {
		e := evidence{events: n, good: n / 2}
		e.fade(evidenceMemory / n)
		if !near(e.events, n/2) || !near(e.good, n/4) {
			t.Errorf("%v events: %+v after half of their life", n, e)
		}
	}
}

// TestAnswersHaveTime checks that a flow is an event after 0.5 s to 1 s, and not bad before.
func TestAnswersHaveTime(t *testing.T) {
	for _, c := range []struct {
		name     string
		answered [3]float64 // in each step, after ten flows were placed in the first
		want     float64    // the share in the end
	}{
		{"at once", [3]float64{10}, 1},
		{"soon", [3]float64{0, 10}, 1},
		{"late", [3]float64{0, 0, 10}, 1},
		{"never", [3]float64{}, 0},
		{"half", [3]float64{3, 2}, 0.5},
	} {
		var a answers
		a.pass(10, c.answered[0], 0.5)
		if a.events != 0 {
			t.Errorf("%s: %v events at once", c.name, a.events)
		}
		a.pass(0, c.answered[1], 0.5)
		if a.events != 10 {
			t.Errorf("%s: %v events after two steps", c.name, a.events)
		}
		a.pass(0, c.answered[2], 1e-9)
		if got := a.good / a.events; math.Abs(got-c.want) > 1e-6 {
			t.Errorf("%s: a share of %v, want %v", c.name, got, c.want)
		}
	}
}

// TestAnswersOfLaterFlows checks that early answers do not count for flows that were lost.
func TestAnswersOfLaterFlows(t *testing.T) {
	var a answers
	a.pass(10, 0, 0.5) // these are lost
	a.pass(20, 20, 0.5)
	a.pass(0, 0, 0.5)
	if got := a.good / a.events; math.Abs(got-2./3) > 0.1 {
		t.Errorf("a share of %v, want 2/3", got)
	}
}
