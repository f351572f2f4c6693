// SPDX-License-Identifier: Apache-2.0

package repro

import "testing"

// TestVerdictsOfRules checks values just inside and just outside of the tolerance.
func TestVerdictsOfRules(t *testing.T) {
	for _, test := range []struct {
		add             func(r *run, measured float64)
		inside, outside float64
	}{
		{func(r *run, m float64) { r.about("q", "71", m, digits, "") }, 71.5, 71.51},
		{func(r *run, m float64) { r.about("q", "71", m, digits, "") }, 70.5, 70.49},
		{func(r *run, m float64) { r.atMost("q", "1", m, stated, "") }, 1 + 1e-8, 1.0001},
		{func(r *run, m float64) { r.atLeast("q", "1", m, stated, "") }, 1 - 1e-8, 0.9999},
		{func(r *run, m float64) { r.smaller("a", "b", m, 1, "") }, 1, 1.001},
		{func(r *run, m float64) { r.alike("q", m, "") }, 0.951, 0.949},
		{func(r *run, m float64) { r.notWorse("q", m, "") }, 0.5, 1.051},
		{func(r *run, m float64) { r.differ("q", m, "") }, 1.051, 1.049},
	} {
		r := &run{}
		test.add(r, test.inside)
		test.add(r, test.outside)
		if c := r.result.Checks; !c[0].OK || c[1].OK {
			t.Errorf("%s: %v is inside: %v, %v is inside: %v", c[0].Paper, test.inside, c[0].OK,
				test.outside, c[1].OK)
		}
	}
}

// TestReasons checks that the note of a check that is outside has its reason, or says that there is
// none, and that other notes stay as they are.
func TestReasons(t *testing.T) {
	r := &run{}
	r.about("q", "1", 3, digits, "a")
	r.because("too %s", "slow")
	r.about("q", "1", 1, digits, "b")
	r.because("of nothing")
	r.about("q", "1", 3, digits, "")
	r.about("q", "1", 3, digits, "c")
	r.unexplained()
	want := []string{"a; reason: too slow", "b", "reason: unexplained", "c; reason: unexplained"}
	for i, c := range r.result.Checks {
		if c.Note != want[i] {
			t.Errorf("note %d is %q, want %q", i, c.Note, want[i])
		}
	}
}
