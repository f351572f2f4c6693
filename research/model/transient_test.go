// SPDX-License-Identifier: Apache-2.0

package model

import (
	"math"
	"testing"

	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/mat"

	"github.com/segue-lb/segue/internal/testhost"
)

func advance(t *testing.T, tr *Transient, duration float64) {
	t.Helper()
	testhost.Must(t, tr.Advance(t.Context(), duration))
}

// TestTransientSettles follows empty and full servers to the steady state.
func TestTransientSettles(t *testing.T) {
	for _, cores := range []int{1, 2} {
		for _, threshold := range []int{0, 1, 4, 9} {
			for _, flows := range []int{0, 7} {
				tr, err := NewTransient(0.7, cores, threshold, flows)
				testhost.Must(t, err)
				if tr.MeanFlows() != float64(flows) {
					t.Errorf("starts with %v flows, want %d", tr.MeanFlows(), flows)
				}
				advance(t, tr, 1500)
				steady := mustSRc(t, 0.7, cores, threshold)
				near(t, "flows", tr.MeanFlows(), steady.MeanFlows(), 1e-6)
				near(t, "rejected", tr.AtLeast(threshold), steady.AtLeast(threshold), 1e-6)
			}
		}
	}
}

// TestTransientOfSingleChoice compares with the exponential of the generator of M/M/1, whose
// equation is linear.
func TestTransientOfSingleChoice(t *testing.T) {
	const load, states = 0.6, 80
	generator := mat.NewDense(states, states, nil)
	for n := range states {
		if n+1 < states {
			generator.Set(n, n+1, load)
		}
		if n > 0 {
			generator.Set(n, n-1, 1)
		}
		generator.Set(n, n, -mat.Sum(generator.RowView(n)))
	}
	tr, err := NewTransient(load, 1, 0, 3)
	testhost.Must(t, err)
	now := 0.0
	for _, pause := range []float64{0.2, 1, 5, 20} {
		now += pause
		advance(t, tr, pause)
		var scaled, exponential mat.Dense
		scaled.Scale(now, generator)
		exponential.Exp(&scaled)
		for n := range 20 {
			want := exponential.At(3, n)
			if got := tr.AtLeast(n) - tr.AtLeast(n+1); math.Abs(got-want) > 1e-7 {
				t.Errorf("after %v, %d flows: %v, want %v", now, n, got, want)
			}
		}
	}
}

// TestTransientInSteps checks that one long advance and several short ones give the same result.
func TestTransientInSteps(t *testing.T) {
	once, err := NewTransient(0.9, 1, 4, 0)
	testhost.Must(t, err)
	often, _ := NewTransient(0.9, 1, 4, 0)
	advance(t, once, 10)
	for range 1000 {
		advance(t, often, 0.01)
	}
	near(t, "flows", often.MeanFlows(), once.MeanFlows(), 1e-7)
	if _, err := NewTransient(0.9, 1, 4, -1); err == nil {
		t.Error("-1 flows: no error")
	}
}

// TestStages checks a property of every Runge-Kutta method: the weights of a stage add up to the
// point of the stage, and the two results are equal if the derivative is constant.
func TestStages(t *testing.T) {
	for i, want := range []float64{0, 1. / 5, 3. / 10, 4. / 5, 8. / 9, 1, 1} {
		if got := floats.Sum(stages[i]); math.Abs(got-want) > 1e-14 {
			t.Errorf("stage %d is at %v of the step, want %v", i, got, want)
		}
	}
	if got := floats.Sum(difference); math.Abs(got) > 1e-15 {
		t.Errorf("the differences add up to %v", got)
	}
}
