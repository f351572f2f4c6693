// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"math"
	"slices"
	"strings"
	"testing"
)

// TestClaimBySimulation compares a ratio with the simulated one, at each point. The ratios of the
// three seeds are 0.8, 0.9 and 1, so half of the interval is 4.303·0.1/√3 = 0.248.
func TestClaimBySimulation(t *testing.T) {
	claim := Claim{Quantity: "mean", Of: "a", Over: "b", Ours: "at most simulated", Rule: "monte-carlo"}
	for simulated, met := range map[float64]bool{0.66: true, 0.64: false} {
		r := measuredRuns(map[string][]float64{"a": {0.8, 0.9, 1}, "b": {1, 1, 1}},
			map[string]float64{"a": simulated, "b": 1})
		c := claim
		c.judge(r)
		if c.Met == nil || *c.Met != met || math.Abs(*c.Measured-0.9) > 1e-9 ||
			math.Abs(*c.Simulated-simulated) > 1e-9 || math.Abs(*c.Tolerance-0.248) > 1e-3 {
			t.Errorf("simulated %v: %+v, want met %v, 0.9 and a tolerance of 0.248", simulated, c, met)
		}
		want := "mean(a) / mean(b): at most simulated ± 0.25 (ours; Monte Carlo, 95%)"
		if c.Condition != want {
			t.Errorf("the condition is %q, want %q", c.Condition, want)
		}
	}
	// Seeds differ, but each measured ratio is 0.01 above the simulated one: there is no interval.
	r := measuredRuns(map[string][]float64{"a": {0.8, 0.9, 1}, "b": {1, 1, 1}}, map[string]float64{"a": 1, "b": 1})
	for i := range 3 {
		r.Runs[i].Simulated.Mean = r.Runs[i].Measured.Mean - 0.01
	}
	c := claim
	if c.judge(r); *c.Met || *c.Tolerance > 1e-9 {
		t.Errorf("%+v, want a tolerance of 0, which 0.01 exceeds", c)
	}
	r = measuredRuns(map[string][]float64{"a": {0.9, 0.9}, "b": {1, 1}}, map[string]float64{"a": 0.89, "b": 1})
	c = claim
	c.Over = "c"
	if c.judge(r); c.Met != nil || c.Measured != nil {
		t.Error("a claim about a case without runs is judged")
	}
	// At the point at which the ratio is the larger one, it is below the simulated one.
	r.Points = append(r.Points, 8)
	for name, times := range map[string][2]float64{"a": {2, 2.5}, "b": {1, 1}} {
		for seed := range 2 {
			r.Runs = append(r.Runs, Run{
				Case: name, Point: 8, Seed: uint64(seed + 1),
				Measured: Response{Mean: times[0]}, Simulated: &Response{Mean: times[1]},
			})
		}
	}
	r.Planned = len(r.Runs)
	c = claim
	if c.judge(r); c.Met == nil || *c.Met || math.Abs(*c.Measured-0.9) > 1e-9 {
		t.Errorf("%+v, want the point 4, which does not meet it", c)
	}
}

// TestClaimOfGrowth compares how much two cases grow from one point to another, seed by seed.
func TestClaimOfGrowth(t *testing.T) {
	var r Results
	r.Points = []float64{1, 4}
	add := func(name string, point, first, second float64) {
		for i, mean := range []float64{first, second} {
			r.Runs = append(r.Runs, Run{Case: name, Point: point, Seed: uint64(i + 1), Measured: Response{Mean: mean}})
		}
	}
	add("a", 1, 1, 2)
	add("a", 4, 3, 6) // three times as much
	add("b", 1, 1, 2)
	add("b", 4, 2, 4) // twice as much
	r.Planned = len(r.Runs)
	c := Claim{Quantity: "mean", Of: "a", Over: "b", At: 4, Since: 1, Paper: "at most 1", Rule: "stated"}
	c.judge(&r)
	if c.Met == nil || *c.Met || math.Abs(*c.Measured-1.5) > 1e-9 {
		t.Errorf("%+v, want 1.5, which is more than 1", c)
	}
	if want := "mean(a) / mean(b) at 4, both relative to 1: at most 1 (paper; as stated)"; c.Condition != want {
		t.Errorf("the condition is %q, want %q", c.Condition, want)
	}
}

// TestClaimOfAPaper compares a ratio with a number of a paper, and with an equal quantity. The
// interval is wider if the paper's number comes from few runs.
func TestClaimOfAPaper(t *testing.T) {
	r := measuredRuns(map[string][]float64{"a": {2, 2.2, 2.4}, "b": {1, 1, 1}, "c": {1, 1.2, 1.4}}, nil)
	half := 4.3027 * 0.2 / math.Sqrt(3) // of the ratios of all pairs of cases below
	for _, test := range []struct {
		c         Claim
		tolerance float64
		met       bool
	}{
		{Claim{Of: "a", Over: "b", Paper: "2.74", Rule: "monte-carlo", PaperRuns: 3}, half*math.Sqrt2 + 0.005, true},
		{Claim{Of: "a", Over: "b", Paper: "2.74", Rule: "monte-carlo"}, half + 0.005, false},
		{Claim{Of: "a", Over: "b", Paper: "2.74", Rule: "monte-carlo", PaperRuns: 1, PaperRequests: 300},
			half*math.Sqrt2 + 0.005, true}, // the runs here have 100 requests
		{Claim{Of: "a", Over: "b", Paper: "1.4", Rule: "monte-carlo"}, half + 0.05, false},
		{Claim{Of: "c", Over: "b", Ours: "equal", Rule: "monte-carlo"}, half, true},
		{Claim{Of: "c", Over: "b", Paper: "equal", Rule: "drawing"}, 0.05, false},
		{Claim{Of: "a", Paper: "2.24 / 1", Rule: "digits"}, 2.245/0.5 - 2.24, true},
	} {
		c := test.c
		c.Quantity = "mean"
		c.judge(r)
		if c.Met == nil || *c.Met != test.met || math.Abs(*c.Tolerance-test.tolerance) > 1e-3 {
			t.Errorf("%+v, want met %v and a tolerance of %v", c, test.met, test.tolerance)
		}
	}
	r.Runs = slices.DeleteFunc(r.Runs, func(run Run) bool { return run.Seed > 1 })
	r.Planned = len(r.Runs)
	c := Claim{Quantity: "mean", Of: "a", Over: "b", Paper: "2", Rule: "monte-carlo"}
	if c.judge(r); c.Met != nil || *c.Measured != 2 || c.Tolerance != nil {
		t.Errorf("%+v, want a value and no verdict, because one seed has no interval", c)
	}
}

// TestClaimAtTwoPoints divides by the quantity of a case at another point.
func TestClaimAtTwoPoints(t *testing.T) {
	r := measuredRuns(map[string][]float64{"a": {2}, "b": {1}}, nil)
	r.Runs = append(r.Runs, Run{Case: "b", Point: 8, Seed: 1, Measured: Response{Mean: 4}})
	r.Planned = len(r.Runs)
	c := Claim{Quantity: "mean", Of: "a", At: 4, Over: "b", OverAt: 8, Paper: "0.50", Rule: "digits"}
	if c.judge(r); !*c.Met || *c.Measured != 0.5 {
		t.Errorf("%+v, want 2/4", c)
	}
}

// TestClaimAboutADifference subtracts the quantity of another case, seed by seed.
func TestClaimAboutADifference(t *testing.T) {
	r := measuredRuns(map[string][]float64{"a": {5, 7}, "b": {1, 4}}, nil)
	c := Claim{Quantity: "mean", Of: "a", Minus: "b", At: 4, Paper: "3.5", Rule: "monte-carlo", PaperRuns: 2}
	c.judge(r)
	// The differences 4 and 3 have a standard error of 0.5.
	if !*c.Met || *c.Measured != 3.5 || math.Abs(*c.Tolerance-(12.706*0.5*math.Sqrt2+0.05)) > 1e-3 ||
		!strings.HasPrefix(c.Condition, "mean(a) - mean(b) at 4: 3.5 ± ") {
		t.Errorf("%+v, want a difference of 3.5", c)
	}
}

// TestClaimAboutCycles says why a claim is not judged if a processor does not count cycles.
func TestClaimAboutCycles(t *testing.T) {
	r := &Results{Points: []float64{1}, Planned: 4}
	for seed := range 2 {
		for i, name := range []string{"hlb", "hash"} {
			r.Runs = append(r.Runs, Run{
				Case: name, Point: 1, Seed: uint64(seed + 1), Cycles: new(float64(1500 - 871*i + 10*seed)),
			})
		}
	}
	c := Claim{Quantity: "cycles", Of: "hlb", Minus: "hash", Paper: "871", Rule: "monte-carlo"}
	if c.judge(r); c.Met == nil || !*c.Met || *c.Measured != 871 || c.Uncounted != "" {
		t.Errorf("%+v, want 871 cycles", c)
	}
	r.Runs[3].Cycles = nil
	if c.judge(r); c.Met != nil || !strings.Contains(c.Uncounted, "does not count CPU cycles") {
		t.Errorf("%+v, want the reason why it is not judged", c)
	}
	r.Planned++
	if c.judge(r); c.Uncounted != "" {
		t.Errorf("a run is missing, and the reason is %q", c.Uncounted)
	}
}

// TestQuantitiesByCapacity compares servers with the largest capacity with the others.
func TestQuantitiesByCapacity(t *testing.T) {
	run := &Run{Shares: []Share{
		{Capacity: 2, Responses: 100, Mean: 0.4},
		{Capacity: 4, Responses: 330, Mean: 0.1},
		{Capacity: 2, Responses: 300, Mean: 0.2},
	}}
	if got := run.responsesRatio(); math.Abs(got-330./200) > 1e-9 {
		t.Errorf("%v responses of a large server for one of another, want 1.65", got)
	}
	if got := run.slowdown(); math.Abs(got-2.5) > 1e-9 { // (0.4·100 + 0.2·300) / 400 = 0.25
		t.Errorf("the other servers take %v times as long, want 2.5", got)
	}
	run.Shares = run.Shares[:1]
	if per, slow := run.responsesRatio(), run.slowdown(); !math.IsNaN(per) || !math.IsNaN(slow) {
		t.Errorf("%v and %v among equal servers, want NaN", per, slow)
	}
}

// TestClaimOfAType compares only the pages of a wiki.
func TestClaimOfAType(t *testing.T) {
	r := &Results{Points: []float64{4}, Planned: 2}
	for seed := range 2 {
		r.Runs = append(r.Runs, Run{
			Case: "a", Point: 4, Seed: uint64(seed + 1), Measured: Response{P90: 7},
			Types: map[string]Response{TypePage: {P90: 3, Distribution: []DistributionPoint{
				{1, 0.5}, {2, 0.75}, {3, 1},
			}}},
		})
	}
	for quantity, want := range map[string]float64{"p90": 3, "p75": 2} {
		c := Claim{Quantity: quantity, Type: TypePage, Of: "a", Paper: "3", Rule: "digits"}
		c.judge(r)
		if *c.Measured != want || !strings.HasPrefix(c.Condition, quantity+" of a page(a): ") {
			t.Errorf("%s: %v, %q", quantity, *c.Measured, c.Condition)
		}
	}
}
