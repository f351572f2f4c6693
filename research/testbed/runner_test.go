// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"errors"
	"testing"
	"time"
)

// TestDisturbedRuns repeats a run while the generator is late or the machine is busy, and gives up in
// the end.
func TestDisturbedRuns(t *testing.T) {
	const limit = 5 * time.Millisecond
	good := Machine{Idle: 0.5, LateP99: 0.004}
	late, busy, unknown := Machine{Idle: 0.5, LateP99: 0.006}, Machine{Idle: 0.05}, Machine{}
	for name, test := range map[string]struct {
		machines []Machine // of the runs, the last one also of all further ones
		limit    time.Duration
		repeats  int
	}{
		"undisturbed":   {[]Machine{good}, limit, 0},
		"late and busy": {[]Machine{late, busy, good}, limit, 2},
		"always late":   {[]Machine{late}, limit, mostRepeats},
		"no limit":      {[]Machine{late}, 0, 0},
		"not measured":  {[]Machine{unknown}, limit, 0},
	} {
		made := 0
		run, err := undisturbed(Options{MostLate: test.limit, Progress: func(string) {}}, func() (*Run, error) {
			m := test.machines[min(made, len(test.machines)-1)]
			made++
			return &Run{Machine: m}, nil
		})
		if err != nil || run.Machine.Repeats != test.repeats || made != test.repeats+1 {
			t.Errorf("%s: %d runs, %+v, %v; want %d repeats", name, made, run, err, test.repeats)
		}
	}
	failure := errors.New("no lab")
	if _, err := undisturbed(Options{}, func() (*Run, error) { return nil, failure }); err != failure {
		t.Errorf("%v, want %v", err, failure)
	}
}

// TestRunReplacesAnEarlierOne requires that a repeated run takes the place of the disturbed one.
func TestRunReplacesAnEarlierOne(t *testing.T) {
	st := &store{directory: t.TempDir(), results: Results{Cases: []string{"a"}, Points: []float64{1}, Planned: 1}}
	for _, mean := range []float64{1, 2} {
		if err := st.add(&Run{Case: "a", Point: 1, Seed: 1, Measured: Response{Mean: mean}}); err != nil {
			t.Fatal(err)
		}
	}
	if runs := st.results.Runs; len(runs) != 1 || runs[0].Measured.Mean != 2 {
		t.Errorf("%+v, want only the second run", runs)
	}
}
