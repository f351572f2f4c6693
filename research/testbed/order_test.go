// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"math"
	"strings"
	"testing"
)

// measuredRuns returns results with a run for each mean, in seconds, of each case at a point. The
// simulator has the means of simulated.
func measuredRuns(means map[string][]float64, simulated map[string]float64) *Results {
	r := &Results{Cases: []string{"a", "b", "c"}, Points: []float64{4}, Axis: Axis{Key: "balancers"}}
	for _, name := range r.Cases {
		for i, mean := range means[name] {
			run := Run{Case: name, Point: 4, Seed: uint64(i + 1), Measured: Response{Mean: mean}}
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

// TestClaimBySimulation allows a ratio to exceed the simulated one by a bound.
func TestClaimBySimulation(t *testing.T) {
	r := measuredRuns(map[string][]float64{"a": {0.9}, "b": {1}}, map[string]float64{"a": 0.81, "b": 1})
	for bound, met := range map[float64]bool{0.1: true, 0.05: false} {
		c := Claim{Quantity: "mean", Of: "a", Over: "b", BeyondSimulated: bound}
		c.judge(r)
		if c.Met == nil || *c.Met != met || *c.Measured != 0.9 || *c.Simulated != 0.81 {
			t.Errorf("bound %v: %+v, want met %v, 0.9 and 0.81", bound, c, met)
		}
		if !strings.HasPrefix(c.Condition, "mean(a) / mean(b), at each point, ≤ simulated + 0.") {
			t.Errorf("the condition is %q", c.Condition)
		}
	}
	c := Claim{Quantity: "mean", Of: "a", Over: "c", BeyondSimulated: 0.1}
	if c.judge(r); c.Met != nil {
		t.Error("a claim about a case without runs is judged")
	}
	// At the point at which the ratio is the larger one, it is below the simulated one.
	r.Points = append(r.Points, 8)
	for name, times := range map[string][2]float64{"a": {2, 2.5}, "b": {1, 1}} {
		r.Runs = append(r.Runs, Run{
			Case: name, Point: 8, Measured: Response{Mean: times[0]}, Simulated: &Response{Mean: times[1]},
		})
	}
	r.Planned = len(r.Runs)
	c = Claim{Quantity: "mean", Of: "a", Over: "b", BeyondSimulated: 0.05}
	if c.judge(r); c.Met == nil || *c.Met || *c.Measured != 0.9 {
		t.Errorf("%+v, want the point 4, which does not meet it", c)
	}
}

// TestClaimOfAgreement requires the mean of one case to be in the confidence interval of another
// one. For three seeds with the means 0.9, 1 and 1.1, half of the interval is 4.303·0.1/√3 = 0.248.
func TestClaimOfAgreement(t *testing.T) {
	for mean, met := range map[float64]bool{1.24: true, 0.76: true, 1.26: false, 0.74: false} {
		r := measuredRuns(map[string][]float64{
			"a": {mean - 0.5, mean, mean + 0.5}, "b": {0.9, 1, 1.1}, "c": {2},
		}, map[string]float64{"a": 0.3, "b": 0.3})
		c := Claim{Quantity: "mean", Of: "a", Over: "b", Agree: true}
		c.judge(r)
		if c.Met == nil || *c.Met != met || math.Abs(*c.Measured-mean) > 1e-9 || math.Abs(*c.Half-0.248) > 1e-3 {
			t.Errorf("mean %v: %+v, want met %v", mean, c, met)
		}
		if want := "mean(a) / mean(b), at each point, = 1 within the 95% confidence interval of mean(b)"; c.Condition != want {
			t.Errorf("the condition is %q, want %q", c.Condition, want)
		}
		c.Over = "c"
		if c.judge(r); c.Met != nil {
			t.Error("a claim about a case with one seed is judged")
		}
	}
}
