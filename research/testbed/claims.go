// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// timesOf are the quantities of a claim that are times, by name.
var timesOf = map[string]func(*Response) float64{
	"mean": func(r *Response) float64 { return r.Mean },
	"p50":  func(r *Response) float64 { return r.P50 },
	"p90":  func(r *Response) float64 { return r.P90 },
	"p99":  func(r *Response) float64 { return r.P99 },
}

// sharesOf are the other quantities. The simulator and the model do not have them.
var sharesOf = map[string]func(*Summary) float64{
	"failed":   func(s *Summary) float64 { return float64(s.Failed) / float64(s.Requests) },
	"fairness": func(s *Summary) float64 { return s.Fairness },
	// The largest distance of a server's responses, or of its open connections, from an even share.
	"from-even": func(s *Summary) float64 { return s.FromEven },
	// The share of the requests that the servers with the largest capacity served.
	"large": func(s *Summary) float64 { return s.Measured.Large },
	// What the balancers infer about the servers with the largest capacity, relative to the others.
	"estimates":     func(s *Summary) float64 { return s.Estimates },
	"overprovision": func(s *Summary) float64 { return s.Overprovision },
}

// The words that Claim.Over may have in place of the name of a case. They compare a case with a
// simulation of the same arrivals.
const (
	overSimulation = "simulation" // with the case's own placement
	overOmniscient = "omniscient" // with a balancer that knows the requests on all servers
)

// overReplay tells whether the claim compares a case with a replay of its arrivals.
func (c Claim) overReplay() bool { return c.Over == overSimulation || c.Over == overOmniscient }

// problems calls fail for each field of the claim that is wrong or does not fit the experiment. A
// claim without a quantity needs only a text.
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
	isTime := timesOf[c.Quantity] != nil
	if !isTime && sharesOf[c.Quantity] == nil {
		fail("quantity", "must be mean, p50, p90, p99, failed, fairness, from-even, large, estimates or overprovision")
	}
	if !known(c.Of) {
		fail("of", "must be a case")
	}
	switch {
	case c.Over == "" || known(c.Over):
	case !c.overReplay() || !isTime:
		fail("over", "must be a case, or simulation or omniscient for a quantity that is a time")
	case e.Kind != KindLoad:
		fail("over", "only runs of the kind load are replayed")
	}
	for name, at := range map[string]float64{"at": c.At, "over-at": c.OverAt} {
		if at != 0 && !slices.Contains(e.Points, at) && !slices.Contains(e.Full.Points, at) {
			fail(name, "must be a point")
		}
	}
	if c.OverAt != 0 && (c.At == 0 || c.Over == "" || c.overReplay()) {
		fail("over-at", "needs at, and a case as over")
	}
	switch {
	case c.Agree:
		c.agreeProblems(e, known(c.Over), fail)
	case c.BeyondSimulated == 0 && c.AtLeast == 0 && c.AtMost == 0:
		fail("at-least", "at-least, at-most, beyond-simulated or agree is required")
	case c.BeyondSimulated == 0:
	case c.AtLeast != 0 || c.AtMost != 0:
		fail("beyond-simulated", "not with at-least or at-most")
	case e.Kind != KindLoad || !isTime || !known(c.Over) || c.OverAt != 0:
		fail("beyond-simulated", "needs a quantity that is a time, another case as over, and the kind load")
	}
}

// agreeProblems checks a claim that two cases agree.
func (c Claim) agreeProblems(e *Experiment, overCase bool, fail func(name, problem string)) {
	switch {
	case c.AtLeast != 0 || c.AtMost != 0 || c.BeyondSimulated != 0:
		fail("agree", "not with at-least, at-most or beyond-simulated")
	case timesOf[c.Quantity] == nil || !overCase || c.OverAt != 0:
		fail("agree", "needs a quantity that is a time, and another case as over")
	case e.Seeds < 2:
		fail("agree", "needs at least 2 seeds")
	}
}

// condition returns the claim's condition for readers.
func (c Claim) condition() string {
	if c.Quantity == "" {
		return ""
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s(%s)", c.Quantity, c.Of)
	if c.OverAt > 0 {
		fmt.Fprintf(&b, " at %v", c.At)
	}
	switch c.Over {
	case "":
	case overSimulation:
		b.WriteString(" / simulated")
	case overOmniscient:
		b.WriteString(" / omniscient")
	default:
		fmt.Fprintf(&b, " / %s(%s)", c.Quantity, c.Over)
	}
	switch at := cmp.Or(c.OverAt, c.At); {
	case at > 0:
		fmt.Fprintf(&b, " at %v", at)
	case c.BeyondSimulated != 0 || c.Agree:
		b.WriteString(", at each point,")
	default:
		b.WriteString(", the largest of all points,")
	}
	if c.AtLeast > 0 {
		fmt.Fprintf(&b, " ≥ %v", c.AtLeast)
	}
	if c.AtMost > 0 {
		fmt.Fprintf(&b, " ≤ %v", c.AtMost)
	}
	if c.BeyondSimulated != 0 {
		fmt.Fprintf(&b, " ≤ simulated + %v", c.BeyondSimulated)
	}
	if c.Agree {
		fmt.Fprintf(&b, " = 1 within the 95%% confidence interval of %s(%s)", c.Quantity, c.Over)
	}
	return b.String()
}

// judge sets Condition. If all runs are there, it also sets the values of the condition's left
// side, and whether the measured value meets the condition. Values that do not exist stay nil.
func (c *Claim) judge(r *Results) {
	c.Condition, c.Measured, c.Half, c.Simulated, c.Model, c.Met = c.condition(), nil, nil, nil, nil, nil
	if c.Quantity == "" || len(r.Runs) != r.Planned {
		return
	}
	switch {
	case c.BeyondSimulated != 0:
		c.judgeBySimulation(r)
		return
	case c.Agree:
		c.judgeAgreement(r)
		return
	}
	if share := sharesOf[c.Quantity]; share != nil {
		c.Measured = c.largest(r, share)
	} else {
		c.Measured = c.largest(r, c.time(measured))
		if c.Over != overSimulation { // relative to itself, the simulated time is always 1
			c.Simulated = c.largest(r, c.time(simulated))
		}
	}
	if c.Quantity == "mean" && !c.overReplay() { // the model has no percentiles
		c.Model = c.largest(r, c.time(modelled))
	}
	if c.Measured != nil {
		c.Met = new((c.AtLeast == 0 || *c.Measured >= c.AtLeast) &&
			(c.AtMost == 0 || *c.Measured <= c.AtMost))
	}
}

// judgeBySimulation compares the ratio of Of to Over at each point with the simulated ratio. It
// keeps both ratios of the point where the measured one exceeds the simulated one the most. If one
// point lacks a value, Met stays nil.
func (c *Claim) judgeBySimulation(r *Results) {
	worst := math.Inf(-1)
	for _, point := range c.points(r) {
		m, s := c.value(r, point, c.time(measured)), c.value(r, point, c.time(simulated))
		if math.IsNaN(m - s) {
			return // not all points can be compared
		}
		if m-s > worst {
			worst, c.Measured, c.Simulated = m-s, &m, &s
		}
	}
	c.Met = new(worst <= c.BeyondSimulated)
}

// judgeAgreement compares the ratio of Of to Over at each point with 1. It keeps the ratio of the
// point where it is the furthest from 1, relative to the interval of Over. If a point lacks a value
// or an interval, Met stays nil.
func (c *Claim) judgeAgreement(r *Results) {
	worst := math.Inf(-1)
	half := func(s *Summary) *Response { return s.Half }
	for _, point := range c.points(r) {
		ratio := c.value(r, point, c.time(measured))
		over := Claim{Quantity: c.Quantity, Of: c.Over}
		interval := over.value(r, point, over.time(half)) / over.value(r, point, over.time(measured))
		far := math.Abs(ratio-1) / interval
		if math.IsNaN(far) {
			return // not all points can be compared
		}
		if far > worst {
			worst, c.Measured, c.Half, c.Simulated = far, &ratio, &interval, nil
			if s := c.value(r, point, c.time(simulated)); !math.IsNaN(s) {
				c.Simulated = &s
			}
		}
	}
	c.Met = new(worst <= 1)
}

// points returns the points that the claim is about.
func (c *Claim) points(r *Results) []float64 {
	if c.At > 0 {
		return []float64{c.At}
	}
	return r.Points
}

func measured(s *Summary) *Response  { return &s.Measured }
func simulated(s *Summary) *Response { return s.Simulated }
func bounded(s *Summary) *Response   { return s.Bound }
func modelled(s *Summary) *Response  { return s.Model }

// time returns a function that reads the claim's quantity, which is a time, from a summary.
// response selects one of the summary's responses, such as the simulated one. The function returns
// NaN if the summary does not have that response.
func (c *Claim) time(response func(*Summary) *Response) func(*Summary) float64 {
	return func(s *Summary) float64 {
		if r := response(s); r != nil {
			return timesOf[c.Quantity](r)
		}
		return math.NaN()
	}
}

// largest returns the left side of the condition: at the claim's point if it names one, and
// otherwise the largest of all points. The result is nil if no point has a value.
func (c *Claim) largest(r *Results, read func(*Summary) float64) *float64 {
	largest := math.Inf(-1)
	for _, point := range c.points(r) {
		if v := c.value(r, point, read); !math.IsNaN(v) {
			largest = max(largest, v)
		}
	}
	if math.IsInf(largest, 0) {
		return nil
	}
	return &largest
}

// value returns the left side of the condition at a point: the quantity of Of, divided by that of
// Over if there is one. read takes the quantity from a case's summary. The result is NaN if a value
// does not exist.
func (c *Claim) value(r *Results, point float64, read func(*Summary) float64) float64 {
	quantity := func(name string, point float64, read func(*Summary) float64) float64 {
		if s := r.Summarise(name, point); s != nil {
			return read(s)
		}
		return math.NaN()
	}
	own := quantity(c.Of, point, read)
	switch c.Over {
	case "":
		return own
	case overSimulation:
		return own / quantity(c.Of, point, c.time(simulated))
	case overOmniscient:
		return own / quantity(c.Of, point, c.time(bounded))
	}
	return own / quantity(c.Over, cmp.Or(c.OverAt, point), read)
}
