// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// quantities are what a claim may be about, by name.
var quantities = map[string]func(*Response) float64{
	"mean": func(r *Response) float64 { return r.Mean },
	"p50":  func(r *Response) float64 { return r.P50 },
	"p90":  func(r *Response) float64 { return r.P90 },
	"p99":  func(r *Response) float64 { return r.P99 },
}

func (c Claim) problems(e *Experiment, fail func(name, problem string)) {
	known := func(name string) bool {
		return slices.ContainsFunc(e.Cases, func(c Case) bool { return c.Name == name })
	}
	if c.Text == "" {
		fail("text", "required")
	}
	if c.Quantity == "" {
		return // only text
	}
	if quantities[c.Quantity] == nil {
		fail("quantity", "must be mean, p50, p90 or p99")
	}
	if !known(c.Of) {
		fail("of", "must be a case")
	}
	if c.Over != "" && !known(c.Over) {
		fail("over", "must be a case")
	}
	if c.AtLeast == 0 && c.AtMost == 0 {
		fail("at-least", "at-least or at-most is required")
	}
}

// condition returns the claim's condition for readers.
func (c Claim) condition() string {
	if c.Quantity == "" {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s(%s)", c.Quantity, c.Of)
	if c.Over != "" {
		fmt.Fprintf(&b, " / %s(%s)", c.Quantity, c.Over)
	}
	if c.At > 0 {
		fmt.Fprintf(&b, " at %v", c.At)
	} else {
		b.WriteString(", the largest of all points,")
	}
	if c.AtLeast > 0 {
		fmt.Fprintf(&b, " ≥ %v", c.AtLeast)
	}
	if c.AtMost > 0 {
		fmt.Fprintf(&b, " ≤ %v", c.AtMost)
	}
	return b.String()
}

// judge fills in what the runs say about the claim.
func (c *Claim) judge(r *Results) {
	c.Holds, c.Measured, c.Simulated, c.Model, c.Met = c.condition(), nil, nil, nil, nil
	if c.Quantity == "" || len(r.Runs) < r.Planned {
		return
	}
	value := func(of func(*Summary) *Response) *float64 {
		largest := math.Inf(-1)
		for _, point := range r.Points {
			if c.At > 0 && point != c.At {
				continue
			}
			if v := c.value(r, point, of); !math.IsNaN(v) {
				largest = max(largest, v)
			}
		}
		if math.IsInf(largest, 0) {
			return nil
		}
		return &largest
	}
	c.Measured = value(func(s *Summary) *Response { return &s.Measured })
	c.Simulated = value(func(s *Summary) *Response { return s.Simulated })
	if c.Quantity == "mean" { // the model has no percentiles
		c.Model = value(func(s *Summary) *Response { return s.Model })
	}
	if c.Measured != nil {
		met := (c.AtLeast == 0 || *c.Measured >= c.AtLeast) && (c.AtMost == 0 || *c.Measured <= c.AtMost)
		c.Met = &met
	}
}

// value returns the left side of the condition at a point, or NaN.
func (c *Claim) value(r *Results, point float64, of func(*Summary) *Response) float64 {
	quantity := func(name string) float64 {
		s := r.Summarise(name, point)
		if s == nil || of(s) == nil {
			return math.NaN()
		}
		return quantities[c.Quantity](of(s))
	}
	v := quantity(c.Of)
	if c.Over != "" {
		v /= quantity(c.Over)
	}
	return v
}
