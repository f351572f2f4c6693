// SPDX-License-Identifier: Apache-2.0

package tolerance

import (
	"math"
	"testing"

	"github.com/segue-lb/segue/research/sim"
)

// TestAllowed checks the tolerance of each rule, for a number, a quotient and a bound.
func TestAllowed(t *testing.T) {
	e := sim.Estimate{Value: 7, Half: 0.1}
	four := Scatter(e, 4, 1)
	for _, test := range []struct {
		rule    Rule
		paper   string
		scatter float64
		want    float64
	}{
		{PrintedDigits, "2.3", 0, 0.05},
		{PrintedDigits, "24.64", 0, 0.005},
		{PrintedDigits, "40", 0, 0.5},
		{PrintedDigits, "0.22 / 0.16", 0, 0.225/0.155 - 0.22/0.16},
		{PrintedDigits, "at most 2.3", 0, 0},
		{PrintedDigits, "equal", 0, 0},
		{Drawing, "2", 0, 0.1},
		{Drawing, "at most 1", 0, 0.05},
		{Stated, "2.3", four, 0},
		{Stated, "at least 1", four, 0},
		{MonteCarlo, "2.3", four, 0.05 + 0.1*math.Sqrt(5)},
		{MonteCarlo, "at most 2.3", four, 0.1 * math.Sqrt(5)},
		{MonteCarlo, "equal", Scatter(e, 4, Derived), 0.1},
	} {
		s, err := Parse(test.paper)
		if err != nil {
			t.Fatal(err)
		}
		if got := test.rule.Allowed(s, test.scatter); math.Abs(got-test.want) > 1e-12 {
			t.Errorf("%v, %q: tolerance %v, want %v", test.rule, test.paper, got, test.want)
		}
	}
}

// TestExcess checks values just inside and just outside of the tolerance.
func TestExcess(t *testing.T) {
	for _, test := range []struct {
		paper           string
		inside, outside float64
	}{
		{"71", 71.1, 71.11},
		{"71", 70.9, 70.89},
		{"at most 1", 1.1, 1.11},
		{"at most 1", 0, 1.2},
		{"at least 1", 0.9, 0.89},
		{"at least 1", 7, 0},
		{"more than 1", 1.1, 1.09},
		{"equal", 0.9, 0.89},
		{"3 / 2", 1.6, 1.61},
	} {
		s, err := Parse(test.paper)
		if err != nil {
			t.Fatal(err)
		}
		if s.Excess(test.inside, 0.1) > 0 || s.Excess(test.outside, 0.1) <= 0 {
			t.Errorf("%s: the excess of %v is %v, and that of %v is %v", test.paper,
				test.inside, s.Excess(test.inside, 0.1), test.outside, s.Excess(test.outside, 0.1))
		}
	}
}

// TestParseRefuses checks that text other than a statement is an error.
func TestParseRefuses(t *testing.T) {
	for _, text := range []string{"", "about 2", "at most", "at most x", "2.3x", "1 / 0", "1 / x", "-1 / 2"} {
		if s, err := Parse(text); err == nil {
			t.Errorf("%q is read as %v", text, s)
		}
	}
}

// TestNamed checks that each rule has a name and a description.
func TestNamed(t *testing.T) {
	for _, rule := range []Rule{PrintedDigits, MonteCarlo, Drawing, Stated} {
		found := false
		for _, r := range Rules {
			if got, ok := Named(r.Key); r.Rule == rule && ok && got == rule && r.Text != "" {
				found = true
			}
		}
		if !found {
			t.Errorf("the rule %q has no name or no description", rule)
		}
	}
	if r, ok := Named("five percent"); ok {
		t.Errorf("%q is a rule", r)
	}
}
