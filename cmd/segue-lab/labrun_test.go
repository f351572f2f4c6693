// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
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
