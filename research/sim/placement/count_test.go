// SPDX-License-Identifier: Apache-2.0

package placement_test

import (
	"reflect"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// TestCountedAlike checks that all placements that count flows count established flows by default,
// and that each can count flows from the SYN instead. The network of the test has delays, so both
// ways differ.
func TestCountedAlike(t *testing.T) {
	counting := 0
	for _, name := range placement.Names() {
		flows := func(count placement.Count) (ended []sim.Ended, counts bool) {
			spec, err := placement.Named(name)
			testhost.Must(t, err)
			field := reflect.ValueOf(spec).Elem().FieldByName("Count")
			if !field.IsValid() {
				return nil, false
			}
			if count != "" {
				field.Set(reflect.ValueOf(count))
			}
			c := eventful(t, name)
			if c.Placement, _, err = spec.Build(); err != nil {
				t.Fatal(err)
			}
			c.Completed = func(_ int, f sim.Ended) { ended = append(ended, f) }
			if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1}); err != nil {
				t.Fatal(err)
			}
			return ended, true
		}
		byDefault, counts := flows("")
		if !counts {
			continue
		}
		counting++
		connected, _ := flows(placement.CountConnected)
		placed, _ := flows(placement.CountPlaced)
		if !reflect.DeepEqual(byDefault, connected) {
			t.Errorf("%s: does not count established flows by default", name)
		}
		if reflect.DeepEqual(byDefault, placed) {
			t.Errorf("%s: counts flows from the SYN by default", name)
		}
	}
	if counting < 14 {
		t.Errorf("%d placements count flows, want at least 14", counting)
	}
}
