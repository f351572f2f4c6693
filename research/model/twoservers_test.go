// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"errors"
	"math"
	"testing"

	"gonum.org/v1/gonum/mat"

	"github.com/segue-lb/segue/internal/testhost"
)

// figure2 is the system of HLB's figure 2, with less room.
func figure2(rule Rule) TwoServers {
	return TwoServers{Speeds: [2]float64{2, 1}, Weights: [2]float64{2, 1}, Load: 1, Observed: 1, Room: 6, Rule: rule}
}

func mustSolve(t *testing.T, s TwoServers) TwoServersResult {
	t.Helper()
	r, err := s.Solve(t.Context())
	testhost.Must(t, err)
	return r
}

// TestChainIsStationary compares with the null space of the generator.
func TestChainIsStationary(t *testing.T) {
	for _, rule := range Rules {
		for _, observed := range []float64{0, 0.5, 1} {
			s := figure2(rule)
			s.Observed, s.Room = observed, 3
			c := s.chain()
			states := len(c.out)
			// One of the equations p·G = 0 follows from the others. Σ p = 1 takes its place.
			a, b := mat.NewDense(states, states, nil), mat.NewVecDense(states, nil)
			for to, ways := range c.in {
				for _, way := range ways {
					a.Set(to, way.from, a.At(to, way.from)+way.rate)
				}
				a.Set(to, to, a.At(to, to)-c.out[to])
			}
			for i := range states {
				a.Set(0, i, 1)
			}
			b.SetVec(0, 1)
			var want mat.VecDense
			testhost.Must(t, want.SolveVec(a, b))
			p, err := s.stationary(t.Context())
			testhost.Must(t, err)
			for i, got := range p {
				if math.Abs(got-want.AtVec(i)) > 1e-7 {
					t.Fatalf("%v, %v observed, state %d: %v, want %v", rule, observed, i, got, want.AtVec(i))
				}
			}
		}
	}
}

// TestIndependentQueues has a rule that ignores the queues. The result is two queues M/M/1/Q,
// whether the balancer knows the flows or not.
func TestIndependentQueues(t *testing.T) {
	for _, observed := range []float64{0, 0.4, 1} {
		s := figure2(ECMP)
		s.Load, s.Observed = 0.8, observed
		r := mustSolve(t, s)
		apart, err := s.SolveApart()
		testhost.Must(t, err)
		for i, speed := range s.Speeds {
			ratio, sum, mean := 1.2/speed, 0.0, 0.0
			for n := range s.Room + 1 {
				sum += math.Pow(ratio, float64(n))
				mean += float64(n) * math.Pow(ratio, float64(n))
			}
			near(t, "flows", r.Flows[i], mean/sum, 1e-7)
			near(t, "flows, apart", apart.Flows[i], mean/sum, 1e-7)
		}
		near(t, "refused, apart", apart.Refused, r.Refused, 1e-7)
		near(t, "duration, apart", apart.Duration, r.Duration, 1e-7)
	}
}

// TestDuration has room for one flow on each server, so that the servers are busy independently.
func TestDuration(t *testing.T) {
	s := figure2(ECMP)
	s.Room, s.Load = 1, 0.5
	first, second := 0.75/2/(1+0.75/2), 0.75/(1+0.75) // Erlang's formula for loads of 0.375 and 0.75
	want := (first*(1-second)*0.5 + (1-first)*second*1 + first*second*(0.5+1)/2) / (1 - (1-first)*(1-second))
	near(t, "duration", mustSolve(t, s).Duration, want, 1e-7)
}

// TestFlowsAreConserved checks that the servers serve all flows that are not refused.
func TestFlowsAreConserved(t *testing.T) {
	for _, rule := range Rules {
		s := figure2(rule)
		s.Observed = 0.7
		p, err := s.stationary(t.Context())
		testhost.Must(t, err)
		list, _ := s.occupancies()
		served := 0.0
		for i, first := range list {
			for j, second := range list {
				if first.flows() > 0 {
					served += p[i*len(list)+j] * s.Speeds[0]
				}
				if second.flows() > 0 {
					served += p[i*len(list)+j] * s.Speeds[1]
				}
			}
		}
		near(t, rule.String(), served, 3*(1-s.result(p).Refused), 1e-7)
	}
}

// TestFigure2 checks the statements of section III-A of HLB about figure 2, for the equation that
// the paper prints. For the Markov chain, WCMP is not better than LSQ.
func TestFigure2(t *testing.T) {
	duration := func(rule Rule, observed float64, weights [2]float64) float64 {
		s := figure2(rule)
		s.Room, s.Observed, s.Weights = 16, observed, weights
		r, err := s.SolveApart()
		testhost.Must(t, err)
		return r.Duration
	}
	right, wrong := [2]float64{2, 1}, [2]float64{1, 2}
	for _, test := range []struct {
		what          string
		better, worse float64
	}{
		{"WCMP before LSQ", duration(WCMP, 1, right), duration(LSQ, 1, right)},
		{"SED before LSQ", duration(SED, 1, right), duration(LSQ, 1, right)},
		{"LSQ before ECMP", duration(LSQ, 1, right), duration(ECMP, 1, right)},
		{"half observed: LSQ before WCMP", duration(LSQ, 0.5, right), duration(WCMP, 0.5, right)},
		{"half observed: SED before WCMP", duration(SED, 0.5, right), duration(WCMP, 0.5, right)},
		{"LSQ, all or half observed", duration(LSQ, 1, right), duration(LSQ, 0.5, right)},
		{"SED, all or half observed", duration(SED, 1, right), duration(SED, 0.5, right)},
		{"WCMP, right and wrong weights", duration(WCMP, 1, right), duration(WCMP, 1, wrong)},
		{"SED, right and wrong weights", duration(SED, 1, right), duration(SED, 1, wrong)},
	} {
		if !(test.better < test.worse) {
			t.Errorf("%s: %v is not below %v", test.what, test.better, test.worse)
		}
	}
	if wcmp, lsq := mustSolve(t, figure2(WCMP)).Duration, mustSolve(t, figure2(LSQ)).Duration; lsq >= wcmp {
		t.Errorf("chain: LSQ %v, WCMP %v", lsq, wcmp)
	}
}

func TestTwoServersErrors(t *testing.T) {
	for want, change := range map[string]func(s *TwoServers){
		"speed 0 of server 2: must be above 0":   func(s *TwoServers) { s.Speeds[1] = 0 },
		"weight -1 of server 1: must be above 0": func(s *TwoServers) { s.Weights[0] = -1 },
		"load 0: must be above 0":                func(s *TwoServers) { s.Load = 0 },
		"observed share 1.5: must be 0 to 1":     func(s *TwoServers) { s.Observed = 1.5 },
		"room for 33 flows: must be 1 to 32":     func(s *TwoServers) { s.Room = 33 },
		"rule 4: must be 0 to 3":                 func(s *TwoServers) { s.Rule = 4 },
	} {
		s := figure2(ECMP)
		change(&s)
		if _, err := s.Solve(t.Context()); err == nil || err.Error() != want {
			t.Errorf("error %v, want %q", err, want)
		}
	}
}

// TestInterrupted ends a long computation when its context ends.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := figure2(LSQ).Solve(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("two servers: error %v", err)
	}
	tr, err := NewTransient(0.9, 1, 4, 0)
	testhost.Must(t, err)
	if err := tr.Advance(ctx, 1e12); !errors.Is(err, context.Canceled) {
		t.Errorf("transient: error %v", err)
	}
}
