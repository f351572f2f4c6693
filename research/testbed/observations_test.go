// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"math"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// TestSpread requires HLB's normalisation: only a balancer's proportions between servers count, and
// only relative to those of the other balancers.
func TestSpread(t *testing.T) {
	for name, test := range map[string]struct {
		measured [][]float64
		want     float64 // NaN: the step does not count
	}{
		"the same proportions":    {[][]float64{{1, 2, 3}, {10, 20, 30}}, 0},
		"proportions of 3 to 1":   {[][]float64{{3, 1}, {1, 3}}, 0.5}, // 1.5 and 0.5 of the mean
		"one sees one server":     {[][]float64{{1, 0}, {1, 1}}, math.Sqrt((1./9 + 1./9 + 1 + 1) / 4)},
		"a server without flows":  {[][]float64{{1, 0, 2}, {2, 0, 4}}, 0},
		"a balancer without any":  {[][]float64{{1, 2}, {0, 0}}, math.NaN()},
		"no balancer has any":     {[][]float64{{0, 0}, {0, 0}}, math.NaN()},
		"one balancer is no sign": {[][]float64{{5, 1}}, 0},
	} {
		var s spread
		s.add(test.measured)
		if got := s.deviation(); !(math.Abs(got-test.want) < 1e-12) && !(s.n == 0 && math.IsNaN(test.want)) {
			t.Errorf("%s: %v (%d values), want %v", name, got, s.n, test.want)
		}
	}
}

// TestNothingToObserve requires that nothing is observed if there is nothing to compare.
func TestNothingToObserve(t *testing.T) {
	for name, p := range map[string]planned{
		"one balancer": {settings: settings{Experiment: Experiment{Balancers: 1}},
			Case: Case{Placement: desired.PlacementInfer}},
		"no estimates": {settings: settings{Experiment: Experiment{Balancers: 2}},
			Case: Case{Placement: desired.PlacementLeastQueue}},
	} {
		o, err := (&rig{}).startObserver(p)
		if o != nil || err != nil {
			t.Errorf("%s: %v, %v, want no observer", name, o, err)
		}
		if got, err := o.stop(); got != nil || err != nil {
			t.Errorf("%s: %v, %v, want no observations", name, got, err)
		}
	}
}
