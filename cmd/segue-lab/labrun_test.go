// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/testbed"
)

// TestPrintOrder checks that the results contain the order of the cases at each point with results,
// unless the experiment does not compare times.
func TestPrintOrder(t *testing.T) {
	r := &testbed.Results{
		Kind: testbed.KindLoad, Axis: testbed.Axis{Key: "balancers"}, Points: []float64{2, 4}, Cases: []string{"a", "b"},
	}
	for name, mean := range map[string]float64{"a": 0.4, "b": 0.3} {
		r.Runs = append(r.Runs, testbed.Run{Case: name, Point: 4, Seed: 1, Measured: testbed.Response{Mean: mean}})
	}
	const want = "order by the mean, balancers 4:\n  b takes 25.0% less than a\n\n"
	var output bytes.Buffer
	testhost.Must(t, printResults(&output, r, "x"))
	if !strings.Contains(output.String(), "\n\n"+want) || strings.Contains(output.String(), "balancers 2") {
		t.Errorf("no %q, or an order at the point 2, in\n%s", want, &output)
	}
	r.Kind = testbed.KindHold
	output.Reset()
	testhost.Must(t, printResults(&output, r, "x"))
	if strings.Contains(output.String(), "order") {
		t.Errorf("open connections have an order:\n%s", &output)
	}
}

// TestPrintCosts checks that the results have a table of CPU times and memory if these were measured.
func TestPrintCosts(t *testing.T) {
	r := &testbed.Results{
		Kind: testbed.KindLoad, Axis: testbed.Axis{Key: "load"}, Points: []float64{0.5}, Cases: []string{"a"},
		Runs: []testbed.Run{{
			Case: "a", Point: 0.5, Requests: 100, CPU: &testbed.CPU{Balancers: 0.01, All: 0.5},
			Memory: &testbed.Memory{Processes: 17 << 20, Kernel: 71 << 20},
		}},
	}
	var output bytes.Buffer
	testhost.Must(t, printResults(&output, r, "x"))
	row := regexp.MustCompile(`(?m)^ +a +0\.5 +100\.0 +- +0\.0 .* 5000\.0 +- +17\.0 +- +71\.0 +- *$`)
	if !row.MatchString(output.String()) || !strings.Contains(output.String(), "CPU time of a request") {
		t.Errorf("no CPU times and memory in\n%s", &output)
	}
	r.Runs[0].CPU = nil
	output.Reset()
	testhost.Must(t, printResults(&output, r, "x"))
	if strings.Contains(output.String(), "CPU time") {
		t.Errorf("CPU times were not measured:\n%s", &output)
	}
}

// TestPrintForwarding prints cycles where these were counted.
func TestPrintForwarding(t *testing.T) {
	r := &testbed.Results{
		Kind: testbed.KindForward, Axis: testbed.Axis{Key: "flows"}, Points: []float64{1}, Cases: []string{"a", "b"},
		Runs: []testbed.Run{
			{Case: "a", Point: 1, Measured: testbed.Response{Mean: 100e-9}},
			{Case: "b", Point: 1, Measured: testbed.Response{Mean: 200e-9}, Cycles: new(520.4)},
		},
	}
	var output bytes.Buffer
	testhost.Must(t, printResults(&output, r, "x"))
	row := regexp.MustCompile(`(?m)^ +a +1 +100\.0 +- +10\.00 .*\n +b +1 +200\.0 +520 +5\.00 `)
	if !row.MatchString(output.String()) {
		t.Errorf("no cycles in\n%s", &output)
	}
}

// TestPrintClaims checks the verdicts of claims: met, not met, without an interval, without results,
// without a condition, and without a counter.
func TestPrintClaims(t *testing.T) {
	for _, test := range []struct {
		claim testbed.Claim
		want  string
	}{
		{
			testbed.Claim{
				Text: "a", Quantity: "mean", Condition: "mean(x): 2 ± 0.5 (paper)",
				Measured: new(2.25), Simulated: new(2.0), Met: new(true),
			},
			"claim: a\n  mean(x): 2 ± 0.5 (paper) is met: 2.25 (simulated: 2)\n",
		},
		{
			testbed.Claim{Text: "a", Quantity: "mean", Condition: "c", Measured: new(3.0), Met: new(false)},
			"claim: a\n  c is not met: 3\n",
		},
		{
			testbed.Claim{Text: "a", Quantity: "mean", Condition: "c", Measured: new(3.0)},
			"claim: a\n  c is not judged: 3\n",
		},
		{testbed.Claim{Text: "a", Quantity: "mean", Condition: "c"}, "claim: a\n"},
		{
			testbed.Claim{Text: "a", Quantity: "cycles", Condition: "c", Uncounted: "why"},
			"claim: a\n  c is not judged: why\n",
		},
		{testbed.Claim{Text: "a", Condition: "not judged: why"}, "claim: a\n  not judged: why\n"},
	} {
		var output bytes.Buffer
		if printClaim(&output, test.claim); output.String() != test.want {
			t.Errorf("%q, want %q", output.String(), test.want)
		}
	}
}
