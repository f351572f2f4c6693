// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"testing"

	"github.com/segue-lb/segue/research/sim"
)

// TestFormula checks the weights of polled servers: the remaining capacity, and 6LB's footnote 7.
func TestFormula(t *testing.T) {
	for _, test := range []struct {
		formula Formula
		busy    int32
		want    float64
	}{
		{"", 0, 2},
		{"", 3, 0.5},
		{Formula6LB, 0, 1},
		{Formula6LB, 16, 0.1 + 0.9*math.Exp(-2)},
		{Formula6LB, 32, 0.1 + 0.9*math.Exp(-8)},
	} {
		got := test.formula.weight(sim.Load{Open: test.busy, Busy: test.busy, Capacity: 2})
		if math.Abs(got-test.want) > 1e-12 {
			t.Errorf("formula %q with %d busy: %v, want %v", test.formula, test.busy, got, test.want)
		}
	}
	if _, _, err := (&WeightedRoundRobin{Formula: "7lb"}).Build(); err == nil {
		t.Error("an unknown formula is no error")
	}
}

// TestSteps checks that weights are rounded, but never to 0.
func TestSteps(t *testing.T) {
	for _, test := range []struct {
		steps        int
		weight, want float64
	}{{0, 0.3, 0.3}, {4, 0.3, 0.25}, {4, 0.4, 0.5}, {4, 0.01, 0.25}} {
		if got := (&Weights{Steps: test.steps}).round(test.weight); got != test.want {
			t.Errorf("%v in steps of 1/%d: %v, want %v", test.weight, test.steps, got, test.want)
		}
	}
}
