// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"regexp"

	"github.com/segue-lb/segue/internal/sim"
)

// caseName is what the expressions of conditions can read as one word.
var caseName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.+-]*$`)

// Condition is an assertion that can be judged.
type Condition struct {
	Text string
	// Expected is what the file says: that it holds, or that it fails.
	Expected bool
	compare  comparison
	bare     bool // a metric names no case, so that it is about each
}

// Verdict is what became of a condition.
type Verdict struct {
	Condition string `json:"condition"`
	// Expected is whether it should hold, Holds whether it does. Defined is false if what it compares
	// was not there, such as percentiles of no flows: then it is not as expected, whatever that is.
	Expected bool `json:"expected"`
	Holds    bool `json:"holds"`
	Defined  bool `json:"defined"`
	// Values are what was compared, such as "0.341 < 0.35".
	Values string `json:"values"`
}

// OK tells whether the condition is as expected.
func (v *Verdict) OK() bool { return v.Defined && v.Expected == v.Holds }

// results are those that expressions look at.
type results struct {
	cases   map[string]*sim.Result
	current string // the case of metrics that name none
}

// Judge judges all conditions. The results are those of Cases, in their order. What it returns is not
// nil, which JSON would have as null.
func (s *Scenario) Judge(all []*sim.Result) []Verdict {
	r := results{cases: make(map[string]*sim.Result)}
	for i, c := range s.Cases {
		r.cases[c.Name] = all[i]
	}
	verdicts := []Verdict{} // none are an empty list, also in JSON
	for _, c := range s.Assertions {
		verdicts = append(verdicts, c.judge(s, r))
	}
	return verdicts
}

// judge is about each case in turn where a metric names none: the condition holds if it does for all,
// is undefined if it is for one, and else fails for the first for which it does not hold.
func (c *Condition) judge(s *Scenario, r results) Verdict {
	v := Verdict{Condition: c.Text, Expected: c.Expected, Holds: true, Defined: true}
	for _, each := range s.Cases {
		r.current = each.Name
		result := c.compare(r)
		defined := result.holds || result.fails
		if v.Holds || !defined {
			v.Holds, v.Defined, v.Values = result.holds, defined, result.values
			if c.bare && len(s.Cases) > 1 {
				v.Values = each.Name + ": " + v.Values
			}
		}
		if !c.bare || !defined {
			break
		}
	}
	return v
}
