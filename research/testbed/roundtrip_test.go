// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestRoundTripInTheSimulator has idle servers and distant clients: a request takes two round trips
// more than its work, under the case's placement and under an omniscient balancer.
func TestRoundTripInTheSimulator(t *testing.T) {
	e := parse(t, `
title: t
axis: round-trip
points: [0.2]
servers: 4
work: "constant: 100ms"
cases: [{name: sed, placement: sed, weighted: true}]
`)
	p := e.with(Options{}).plan()[0]
	var text strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&text, "%d\t/?work=100ms\n", i)
	}
	run := comparedWith(t, p, text.String())
	for name, r := range map[string]*Response{"simulated": run.Simulated, "omniscient": run.Bound} {
		if math.Abs(r.Mean-0.5) > 0.02 {
			t.Errorf("%s: %v s, want 0.1 s and two round trips of 0.2 s in the mean", name, r.Mean)
		}
	}
	if run.Model != nil {
		t.Error("the model knows round trips")
	}
	if trip := p.roundTrip(); trip.Mean() != 0.2 {
		t.Errorf("the mean round trip is %v s, want 0.2 s", trip.Mean())
	}
}

// TestOmniscientAtADistance checks that an omniscient balancer is not worse than one that knows only
// its own flows, although requests reach servers late.
func TestOmniscientAtADistance(t *testing.T) {
	e := parse(t, `
title: t
axis: round-trip
points: [0.2]
servers: 4
load: 0.85
work: "exponential: 100ms"
connections: 2000
cases: [{name: sed, placement: sed, weighted: true}]
`)
	p := e.with(Options{}).plan()[0]
	var text strings.Builder
	for i := range p.Connections {
		work := -100 * math.Log(1-(float64(i*617%p.Connections)+0.5)/float64(p.Connections))
		fmt.Fprintf(&text, "%.6f\t/?work=%.3fms\n", float64(i)/p.rate(), work)
	}
	run := comparedWith(t, p, text.String())
	if run.Bound.Mean > 1.05*run.Simulated.Mean {
		t.Errorf("an omniscient balancer has %v s, and sed %v s", run.Bound.Mean, run.Simulated.Mean)
	}
}

// comparedWith returns a run that is compared with the simulations of these arrivals.
func comparedWith(t *testing.T, p planned, text string) *Run {
	t.Helper()
	arrivals := filepath.Join(t.TempDir(), arrivalsFile)
	testhost.Must(t, os.WriteFile(arrivals, []byte(text), 0o644))
	run := &Run{}
	testhost.Must(t, p.compare(t.Context(), run, arrivals))
	return run
}
