// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"regexp"

	"github.com/segue-lb/segue/research/sim"
)

// caseName matches names of cases that an expression can read as one word.
var caseName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.+-]*$`)

// Condition is an assertion that can be judged.
type Condition struct {
	Text string
	// Expected tells whether the file expects the condition to hold or to fail.
	Expected  bool
	compare   comparison
	everyCase bool // one of its metrics names no case, so the condition is about each case
}

// Verdict is the result of a condition.
type Verdict struct {
	Condition string `json:"condition"`
	// Expected tells whether the condition should hold, and Holds whether it does. Defined is
	// false if a compared value does not exist, such as a percentile of no flows. Such a verdict
	// is never as expected.
	Expected bool `json:"expected"`
	Holds    bool `json:"holds"`
	Defined  bool `json:"defined"`
	// Values are the compared values, such as "0.341 < 0.35".
	Values string `json:"values"`
}

// OK tells whether the result is the expected one.
func (v *Verdict) OK() bool { return v.Defined && v.Expected == v.Holds }

// results are the results that expressions refer to.
type results struct {
	cases   map[string]*sim.Result
	current string // the case of metrics without a case
}

// Judge judges all conditions. The results must be those of Cases, in the same order. The returned
// slice is never nil, because nil would be null in JSON.
func (s *Scenario) Judge(all []*sim.Result) []Verdict {
	r := results{cases: make(map[string]*sim.Result)}
	for i, c := range s.Cases {
		r.cases[c.Name] = all[i]
	}
	verdicts := []Verdict{} // an empty list, and not null, in JSON
	for _, c := range s.Assertions {
		verdicts = append(verdicts, c.judge(s, r))
	}
	return verdicts
}

// judge judges a condition. If one of its metrics names no case, judge goes through all cases. Then
// the condition holds if it holds for all of them, and it is undefined if it is undefined for one.
// Otherwise it fails, and the verdict has the values of the first case for which it fails.
func (c *Condition) judge(s *Scenario, r results) Verdict {
	v := Verdict{Condition: c.Text, Expected: c.Expected, Holds: true, Defined: true}
	for _, each := range s.Cases {
		r.current = each.Name
		result := c.compare(r)
		defined := result.holds || result.fails
		if v.Holds || !defined { // after a failure, only an undefined case changes the verdict
			v.Holds, v.Defined, v.Values = result.holds, defined, result.values
			if c.everyCase && len(s.Cases) > 1 {
				v.Values = each.Name + ": " + v.Values
			}
		}
		if !c.everyCase || !defined {
			break
		}
	}
	return v
}
