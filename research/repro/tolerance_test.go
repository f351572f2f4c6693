// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"math"
	"testing"

	"github.com/segue-lb/segue/research/sim"
)

// TestTolerances checks the tolerance of each rule, for a number and for a bound.
func TestTolerances(t *testing.T) {
	four := sampled(sim.Estimate{Value: 7, Half: 0.1}, 4, 1)
	for _, test := range []struct {
		by       allowance
		relation Relation
		paper    string
		want     float64
	}{
		{digits, About, "2.3", 0.05},
		{digits, About, "24.64", 0.005},
		{digits, About, "40", 0.5},
		{digits, AtMost, "2.3", 0},
		{drawn, About, "2", 0.1},
		{drawn, AtMost, "1", 0.05},
		{stated, About, "2.3", 0},
		{stated, AtLeast, "1", 0},
		{four, About, "2.3", 0.05 + 0.1*math.Sqrt(5)},
		{four, AtMost, "2.3", 0.1 * math.Sqrt(5)},
		{sampled(sim.Estimate{Value: 7, Half: 0.1}, 4, derived), About, "2.3", 0.15},
	} {
		r := &run{}
		r.check("q", test.relation, test.paper, 0, test.by, "")
		if got := r.result.Checks[0]; math.Abs(got.Tolerance-test.want) > 1e-12 ||
			got.Rule != test.by.rule {
			t.Errorf("%v, %s %s: tolerance %v, want %v", test.by, test.relation, test.paper,
				got.Tolerance, test.want)
		}
	}
}

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

// TestRulesAreDescribed checks that the page explains each rule that rows may name.
func TestRulesAreDescribed(t *testing.T) {
	described := map[Rule]bool{}
	for _, r := range Rules {
		described[r.Rule] = r.Text != ""
	}
	for _, a := range []allowance{digits, drawn, stated, sampled(sim.Estimate{}, 1, 1)} {
		if !described[a.rule] {
			t.Errorf("rule %q has no description", a.rule)
		}
	}
}
