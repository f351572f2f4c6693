// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"math"
	"testing"
)

// measuredRuns returns results with a run for each mean, in seconds, of each case at a point. The
// simulator has the means of simulated.
func measuredRuns(means map[string][]float64, simulated map[string]float64) *Results {
	r := &Results{Cases: []string{"a", "b", "c"}, Points: []float64{4}, Axis: Axis{Key: "balancers"}}
	for _, name := range r.Cases {
		for i, mean := range means[name] {
			run := Run{Case: name, Point: 4, Seed: uint64(i + 1), Measured: Response{Mean: mean}, Requests: 100}
			if s := simulated[name]; s > 0 {
				run.Simulated = &Response{Mean: s}
			}
			r.Runs = append(r.Runs, run)
		}
	}
	r.Planned = len(r.Runs)
	return r
}

// TestOrder compares cases seed by seed: the means differ much between the seeds, and the ratios
// little. For three seeds, Student's factor is 4.303, and the confidence of a mean that is t standard
// errors above 0 is 1/2 + t/(2√(2+t²)).
func TestOrder(t *testing.T) {
	r := measuredRuns(map[string][]float64{
		"a": {0.2, 0.4, 0.8}, "b": {0.1 * 0.9, 0.2, 0.4 * 1.1}, "c": {1},
	}, map[string]float64{"a": 0.4, "b": 0.3})
	steps := r.Order(4)
	if len(steps) != 2 || steps[0].Better != "b" || steps[0].Worse != "a" || steps[1].Worse != "c" {
		t.Fatalf("the order is %v, want b, a, c", steps)
	}
	s := steps[0]
	if deviation := 0.05 / math.Sqrt(3); math.Abs(s.Less-0.5) > 1e-9 || math.Abs(s.Half-4.303*deviation) > 1e-3 {
		t.Errorf("less %v ± %v, want 0.5 ± %v", s.Less, s.Half, 4.303*deviation)
	}
	if want := "b takes 50.0% ± 12.4 less than a (simulated: 25.0%), with a confidence of 99.8%"; s.String() != want {
		t.Errorf("%q, want %q", s, want)
	}
	if want := "a takes 80.0% less than c"; steps[1].String() != want { // one seed, no simulation
		t.Errorf("%q, want %q", steps[1], want)
	}
	if got := confidence([]float64{0, 0.1, 0.2}); math.Abs(got-0.8873) > 1e-3 { // t = √3
		t.Errorf("confidence %v, want 0.887", got)
	}
}
