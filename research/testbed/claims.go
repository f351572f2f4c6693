// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/gonum/stat"

	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/tolerance"
)

// responseQuantities are the quantities of a claim that a response has, by name. The simulator has
// them, too, and the model has the mean.
var responseQuantities = map[string]func(*Response) float64{
	"mean": func(r *Response) float64 { return r.Mean },
	"p50":  func(r *Response) float64 { return r.P50 },
	"p75":  func(r *Response) float64 { return r.quantile(0.75) },
	"p90":  func(r *Response) float64 { return r.P90 },
	"p99":  func(r *Response) float64 { return r.P99 },
	// The share of the requests that the servers with the largest capacity served.
	"large": func(r *Response) float64 { return r.Large },
}

// runQuantities are the other quantities, which only measured runs have.
var runQuantities = map[string]func(*Run) float64{
	"failed":   func(r *Run) float64 { return float64(r.Failed) / float64(r.Requests) },
	"fairness": positive(func(r *Run) float64 { return r.Fairness }),
	// The largest distance of a server's responses, or of its open connections, from an even share.
	"from-even": (*Run).FromEven,
	// What the balancers infer about the servers with the largest capacity, relative to the others.
	"estimates": (*Run).EstimateRatio,
	// The responses of a server with the largest capacity, relative to those of another server.
	"per-server": (*Run).responsesRatio,
	// The mean response time of the other servers, relative to that of the servers with the largest
	// capacity.
	"slowdown":      (*Run).slowdown,
	"overprovision": positive(func(r *Run) float64 { return r.Overprovision }),
	// How far the balancers differ in what they see of the servers: of their numbers of flows, of
	// the durations of flows, and the former relative to the latter.
	"flow-spread":     observed(func(o *Observations) float64 { return o.Flows }),
	"duration-spread": observed(func(o *Observations) float64 { return o.Durations }),
	"spread-ratio":    observed(func(o *Observations) float64 { return o.Flows / o.Durations }),
	// The CPU time of a request: of the balancers, and of the whole lab.
	"balancer-cpu": cpuQuantity(func(c *CPU) float64 { return c.Balancers + c.BalancerPrograms }),
	"lab-cpu":      cpuQuantity(func(c *CPU) float64 { return c.All }),
	// The memory of the balancers in MiB: of their processes, and of their BPF maps and programs.
	"memory": memoryQuantity(func(m *Memory) uint64 { return m.Processes + m.Kernel }),
	// The CPU cycles of a packet, for KindForward.
	"cycles": func(r *Run) float64 {
		if r.Cycles == nil {
			return math.NaN()
		}
		return *r.Cycles
	},
}

// positive returns a quantity that is never 0 if it is known. It is NaN if it is unknown.
func positive(of func(*Run) float64) func(*Run) float64 {
	return func(r *Run) float64 {
		if v := of(r); v != 0 {
			return v
		}
		return math.NaN()
	}
}

// observed returns a quantity of what balancers see. It is NaN for runs without observations.
func observed(of func(*Observations) float64) func(*Run) float64 {
	return func(r *Run) float64 {
		if r.Observations == nil {
			return math.NaN()
		}
		return of(r.Observations)
	}
}

// toSimulated is the word in place of the number of a statement that stands for the left side of
// the condition in the simulator, for the same requests.
const toSimulated = "simulated"

// stated returns the claim's statement: the paper's, or ours.
func (c Claim) stated() string { return cmp.Or(c.Paper, c.Ours) }

// statement reads the claim's statement. If the statement is relative to the simulator, it has the
// given value.
func (c Claim) statement(simulated float64) (tolerance.Printed, error) {
	relation, ok := strings.CutSuffix(c.stated(), toSimulated)
	if !ok {
		return tolerance.Parse(c.stated())
	}
	// Parse reads the relation with a number in place of the word. Only printed numbers are rounded.
	p, err := tolerance.Parse(relation + "0")
	p.Value, p.Rounding = simulated, 0
	return p, err
}

// isToSimulated tells whether the claim's statement is relative to the simulator.
func (c Claim) isToSimulated() bool { return strings.HasSuffix(c.stated(), toSimulated) }

// problems calls fail for each field of the claim that is wrong or does not fit the experiment. A
// claim without a quantity needs a text and the reason why it is not judged.
func (c Claim) problems(e *Experiment, fail func(name, problem string)) {
	if c.Text == "" {
		fail("text", "required")
	}
	if (c.Quantity == "") != (c.Unjudged != "") {
		fail("unjudged", "must be the reason why a claim without a quantity is not judged")
	}
	if c.Quantity == "" {
		return // only text
	}
	ofResponse := responseQuantities[c.Quantity] != nil
	if !ofResponse && runQuantities[c.Quantity] == nil {
		fail("quantity", "must be one of "+quantityNames())
	}
	if (strings.HasSuffix(c.Quantity, "-cpu") || c.Quantity == "memory") && !e.CPUTime {
		fail("quantity", "needs cpu-time")
	}
	if c.Quantity == "cycles" && e.Kind != KindForward {
		fail("quantity", "are only for the kind forward")
	}
	known := func(name string) bool {
		return slices.ContainsFunc(e.Cases, func(c Case) bool { return c.Name == name })
	}
	if !known(c.Of) {
		fail("of", "must be a case")
	}
	if c.Over != "" && !known(c.Over) {
		fail("over", "must be a case")
	}
	if c.Minus != "" && (!known(c.Minus) || c.Over != "") {
		fail("minus", "must be a case, without over")
	}
	for name, at := range map[string]float64{"at": c.At, "over-at": c.OverAt, "since": c.Since} {
		if at != 0 && !slices.Contains(e.Points, at) && !slices.Contains(e.Full.Points, at) {
			fail(name, "must be a point")
		}
	}
	if c.OverAt != 0 && (c.At == 0 || c.Over == "") {
		fail("over-at", "needs at, and a case as over")
	}
	if c.Since != 0 && (c.At == 0 || c.Over == "" || c.OverAt != 0) {
		fail("since", "needs at, a case as over, and no over-at")
	}
	if c.Type != "" && (!ofResponse || e.Static == 0 || c.Type != TypePage && c.Type != TypeStatic) {
		fail("type", fmt.Sprintf("must be %q or %q, for a time of a wiki with static files", TypePage, TypeStatic))
	}
	c.statementProblems(e, ofResponse, fail)
}

// statementProblems checks the statement of the claim and its rule. ofResponse tells that the
// simulator has the quantity.
func (c Claim) statementProblems(e *Experiment, ofResponse bool, fail func(name, problem string)) {
	if (c.Paper == "") == (c.Ours == "") {
		fail("paper", "either paper or ours is required")
		return
	}
	name := "paper"
	if c.Ours != "" {
		name = "ours"
	}
	if _, err := c.statement(0); err != nil {
		fail(name, "must be a number as printed, a quotient of two, equal, or a bound such as \"at most 1\"")
	}
	if c.stated() == tolerance.Equal && c.Over == "" {
		fail("over", "required, because equal is about the ratio of two cases")
	}
	if c.isToSimulated() && (name != "ours" || !ofResponse || e.Kind != KindLoad) {
		fail(name, "only our claims about times under the kind load can be relative to the simulator")
	}
	rule, ok := tolerance.Named(c.Rule)
	if !ok {
		fail("rule", "must be digits, monte-carlo, drawing or stated")
	}
	if rule == tolerance.MonteCarlo && max(e.Seeds, e.Full.Seeds) < 2 {
		fail("rule", "monte-carlo needs at least 2 seeds")
	}
	if c.PaperRuns < 0 || c.PaperRuns > 0 && (rule != tolerance.MonteCarlo || c.Paper == "") {
		fail("paper-runs", "must be the paper's number of runs, for the rule monte-carlo")
	}
	if c.PaperRequests > 0 && c.PaperRuns == 0 {
		fail("paper-requests", "needs paper-runs")
	}
}

// condition returns the claim's condition for readers. For a claim that is not judged, it is the
// reason.
func (c Claim) condition() string {
	if c.Quantity == "" {
		return "not judged: " + c.Unjudged
	}
	var b strings.Builder
	quantity := c.Quantity
	if c.Type != "" {
		quantity += " of a " + c.Type
	}
	fmt.Fprintf(&b, "%s(%s)", quantity, c.Of)
	if c.OverAt > 0 {
		fmt.Fprintf(&b, " at %v", c.At)
	}
	if c.Over != "" {
		fmt.Fprintf(&b, " / %s(%s)", quantity, c.Over)
	}
	if c.Minus != "" {
		fmt.Fprintf(&b, " - %s(%s)", quantity, c.Minus)
	}
	if at := cmp.Or(c.OverAt, c.At); at > 0 {
		fmt.Fprintf(&b, " at %v", at)
	}
	if c.Since > 0 {
		fmt.Fprintf(&b, ", both relative to %v", c.Since)
	}
	fmt.Fprintf(&b, ": %s", c.stated())
	if c.Tolerance != nil && *c.Tolerance > 0 {
		fmt.Fprintf(&b, " ± %.2g", *c.Tolerance)
	}
	whose := "paper"
	if c.Ours != "" {
		whose = "ours"
	}
	rule, _ := tolerance.Named(c.Rule)
	fmt.Fprintf(&b, " (%s; %s)", whose, rule)
	return b.String()
}

// judge compares the left side of the condition with the statement at each point of the claim. It
// keeps the values of the point where the left side is the furthest outside of the tolerance, or
// the closest to its end. Met tells whether it is inside at all points. Values that do not exist
// stay nil, and without them Met does, too. If runs are missing, no value exists.
func (c *Claim) judge(r *Results) {
	c.Measured, c.Tolerance, c.Simulated, c.Model, c.Met = nil, nil, nil, nil, nil
	c.Uncounted = ""
	defer func() { c.Condition = c.condition() }()
	if c.Quantity == "" || len(r.Runs) != r.Planned {
		return
	}
	points := r.Points
	if c.At > 0 {
		points = []float64{c.At}
	}
	worst := math.Inf(-1)
	for _, point := range points {
		v := c.compare(r, point)
		if v.excess > worst || math.IsNaN(v.excess) {
			c.Measured, c.Tolerance = known(v.measured), known(v.tolerance)
			c.Simulated, c.Model = known(v.simulated), known(v.model)
			worst = v.excess
		}
		if math.IsNaN(worst) { // not all points can be compared
			if c.Quantity == "cycles" && c.Measured == nil {
				c.Uncounted = noCounter
			}
			return
		}
	}
	c.Met = new(worst <= 0)
}

// noCounter is why runs lack cycles.
const noCounter = "the processor of these runs does not count CPU cycles, or its virtual machine " +
	"does not let it"

// known returns a pointer to the value, or nil if it is NaN.
func known(v float64) *float64 {
	if math.IsNaN(v) {
		return nil
	}
	return &v
}

// comparison has the values of a claim at a point. excess is the part of the distance from the
// statement that the tolerance does not allow, or less than 0. Values that do not exist are NaN.
type comparison struct{ measured, simulated, model, tolerance, excess float64 }

// compare compares the left side with the statement at a point. The left side is the mean over the
// seeds.
func (c *Claim) compare(r *Results, point float64) comparison {
	samples := c.samples(r, point, measured)
	own := sim.EstimateOf(samples)
	replayed := c.samples(r, point, simulated)
	v := comparison{
		measured: own.Value, simulated: stat.Mean(replayed, nil),
		model: stat.Mean(c.samples(r, point, modelled), nil),
	}
	if c.isToSimulated() {
		// The simulator has the same requests, so the seeds are compared one by one.
		for i := range samples {
			samples[i] -= replayed[i]
		}
		own.Half = sim.EstimateOf(samples).Half
	}
	// Parse accepted both when the file was read.
	stated, _ := c.statement(v.simulated)
	rule, _ := tolerance.Named(c.Rule)
	scatter := tolerance.Scatter(own, len(samples), c.comparableRuns(r, point))
	v.tolerance = rule.Allowed(stated, scatter)
	v.excess = stated.Excess(v.measured, v.tolerance)
	return v
}

// comparableRuns returns the paper's number of runs, if each had as many requests as the runs here.
// The variance of a mean is in inverse proportion to the number of requests.
func (c *Claim) comparableRuns(r *Results, point float64) float64 {
	runs := float64(c.PaperRuns)
	if run := r.run(c.Of, point, 1); c.PaperRequests > 0 && run != nil && run.Requests > 0 {
		runs *= float64(c.PaperRequests) / float64(run.Requests)
	}
	return runs
}

// samples returns the left side of the condition at a point for each seed: the quantity of Of,
// divided by that of Over, or less that of Minus, if there is one. With Since, each quantity is
// relative to that at Since. response selects one of a run's responses, such as the simulated one. A
// value that does not exist is NaN.
func (c *Claim) samples(r *Results, point float64, response func(*Run) *Response) (all []float64) {
	for i := range r.Runs {
		run := &r.Runs[i]
		if run.Case != c.Of || run.Point != point {
			continue
		}
		value := c.value(run, response)
		if c.Over != "" {
			value /= c.value(r.run(c.Over, cmp.Or(c.OverAt, point), run.Seed), response)
		}
		if c.Since > 0 {
			value /= c.value(r.run(c.Of, c.Since, run.Seed), response) /
				c.value(r.run(c.Over, c.Since, run.Seed), response)
		}
		if c.Minus != "" {
			value -= c.value(r.run(c.Minus, point, run.Seed), response)
		}
		all = append(all, value)
	}
	return all
}

// run returns the run of a case at a point with a seed, or nil.
func (r *Results) run(name string, point float64, seed uint64) *Run {
	for i := range r.Runs {
		if run := &r.Runs[i]; run.Case == name && run.Point == point && run.Seed == seed {
			return run
		}
	}
	return nil
}

func measured(r *Run) *Response  { return &r.Measured }
func simulated(r *Run) *Response { return r.Simulated }
func modelled(r *Run) *Response  { return r.Model }

// value returns the claim's quantity of a run. It is NaN if it does not exist. The model has only
// the mean, and only measured runs have types of requests.
func (c *Claim) value(run *Run, response func(*Run) *Response) float64 {
	if run == nil {
		return math.NaN()
	}
	r := response(run)
	if runQuantities[c.Quantity] != nil {
		if r != &run.Measured {
			return math.NaN()
		}
		return run.quantity(c.Quantity)
	}
	if r == nil || r == run.Model && c.Quantity != "mean" {
		return math.NaN()
	}
	if c.Type != "" {
		ofType, ok := run.Types[c.Type]
		if !ok || r != &run.Measured {
			return math.NaN()
		}
		r = &ofType
	}
	return responseQuantities[c.Quantity](r)
}

// quantile returns the time that a share q of the requests did not exceed, or NaN if the
// distribution is not known.
func (r *Response) quantile(q float64) float64 {
	for _, p := range r.Distribution {
		if p.Share >= q {
			return p.Seconds
		}
	}
	return math.NaN()
}
