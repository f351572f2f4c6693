// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"html/template"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/testbed"
)

// content has everything that the page shows of one directory of results.
type content struct {
	*testbed.Results
	ID string
	// Described says how requests of each case come to servers.
	Described []fact
	Claims    []claim
	// Met and Judged are the numbers of claims that are met, and that could be judged.
	Met, Judged int
	Agreement   string
	Orders      []order
	// Disturbances are the runs that may not be valid. The page always shows those in Disturbed.
	// The reader must open the others, in AlsoDisturbed.
	Disturbances             []disturbance
	Disturbed, AlsoDisturbed []disturbance
	Sections                 []shownSection
	Rows                     []row
	// Measures are the names of the times in Rows.
	Measures      []string
	Unit          string
	HasSimulation bool
	HasBound      bool
	Handshakes    []row
	HasModel      bool
	Forwards      bool   // the times are of packets, and not of requests
	Holds         bool   // the shares of servers count open connections, and not responses
	Counted       string // what the shares of servers count
	Servers       []serverTable
	Use           []useRow
	Types         []typeRow
	CostNames     []string
	Costs         []costRow
	Machine       []machineRow
	Facts         []fact
	figures       []figure
}

// shownSection is a section with charts as elements of the page.
type shownSection struct {
	Title, Note string
	Class       string
	SVGs, More  []template.HTML
}

// claim is a line of the table of claims.
type claim struct {
	Text, Condition            string
	Measured, Simulated, Model string
	Verdict                    string
	Class                      string
}

// order has the cases at a point, from the best to the worst.
type order struct {
	Point string
	Steps []testbed.Step
}

// row is a line of the table of response times.
type row struct {
	Case, Point string
	First       bool // it is the first row of its case
	Runs        int
	Times       []value
	Requests    uint64
	Failed      uint64
	FailedShare string
	Failures    string // the number of each kind
	Simulated   value
	Deviation   value // of the measured mean from the simulated one, in percent
	Far         bool  // the deviation is larger than farOff
	Bound       value
	TimesBound  value // the measured mean, as a multiple of Bound
	Model       value
	Cycles      value  // CPU cycles of a packet
	PerSecond   string // millions of packets that a core can forward
	// FromEven is the largest distance of a server's open connections from an even share.
	FromEven value
}

// farOff is the deviation of the measured mean from the simulated one, in percent, beyond which the
// table marks it.
const farOff = 10

// serverTable has the servers of a case at the point with the longest response times.
type serverTable struct {
	Case, Point string
	Hunts       bool
	Adapts      bool // the accept policy changes its threshold
	Servers     []serverRow
}

type serverRow struct {
	testbed.Share
	Part, Milliseconds, Workers, Threshold string
}

// fact is a line about the environment or about a case.
type fact struct{ Name, Value string }

// content returns what the page shows of the results.
func (f *folder) content() (*content, error) {
	c := &content{
		Results: f.Results, ID: fileName(f.name), Disturbances: f.disturbances(),
		HasSimulation: f.hasSimulation(), Forwards: f.forwards(), Holds: f.holds(),
		Counted: strings.ToLower(f.counted()), Rows: f.rows(), Unit: f.unit().Name,
		Handshakes: f.handshakes(), Servers: f.serverTables(), Use: f.use(), Types: f.types(),
		CostNames: f.costNames(), Costs: f.costRows(),
		Machine: f.machineRows(), Facts: f.facts(), Described: f.described(),
	}
	always := min(len(c.Disturbances), 3) // the number that the page always shows
	c.Disturbed, c.AlsoDisturbed = c.Disturbances[:always], c.Disturbances[always:]
	c.addClaims()
	c.Agreement, c.Orders = f.agreement(), f.orders()
	for i := range c.Rows {
		c.HasModel = c.HasModel || c.Rows[i].Model.Number != unknown
		c.HasBound = c.HasBound || c.Rows[i].Bound.Number != unknown
	}
	for _, m := range f.presentMeasures() {
		c.Measures = append(c.Measures, m.name)
	}
	return c, c.addSections(f)
}

// addSections adds the sections that have figures.
func (c *content) addSections(f *folder) error {
	overTime, err := f.overTime()
	if err != nil {
		return err
	}
	sections := []section{
		f.responses(),
		f.distributions("Distribution of response times", "Response times", "cdf",
			measured, simulated, modelled),
	}
	sections = append(append(sections, f.typeSections()...), overTime)
	if f.Bin > 0 {
		day, err := f.overDay()
		if err != nil {
			return err
		}
		sections = append(sections, day)
	}
	sections = append(sections, f.failures(), f.large(), f.shares(), f.offers(),
		f.distributions("Time from SYN to SYN-ACK", "SYN to SYN-ACK", "handshake", handshake))
	for _, s := range sections {
		if len(s.figures)+len(s.rest) == 0 {
			continue
		}
		c.figures = append(append(c.figures, s.figures...), s.rest...)
		class := "charts"
		if s.pairs {
			class = "charts pairs"
		}
		c.Sections = append(c.Sections,
			shownSection{s.title, s.note, class, inline(s.figures), inline(s.rest)})
	}
	return nil
}

// inline draws figures as elements of the page.
func inline(figures []figure) (svgs []template.HTML) {
	for i := range figures {
		// package chart has escaped all text
		svgs = append(svgs, template.HTML(figures[i].chart.Inline()))
	}
	return svgs
}

// addClaims adds the claims with their verdicts. It counts the claims that were judged, and those
// that are met.
func (c *content) addClaims() {
	text := func(v *float64) string {
		if v == nil {
			return unknown
		}
		return number(*v)
	}
	for _, p := range c.Results.Claims {
		shown := claim{
			Text: chart.Unbroken(p.Text), Condition: chart.Unbroken(p.Condition),
			Measured: text(p.Measured), Simulated: text(p.Simulated), Model: text(p.Model),
			Verdict: "not judged", Class: "faint",
		}
		if p.Uncounted != "" {
			shown.Condition += "; " + p.Uncounted
		}
		if p.Met != nil {
			c.Judged++
			shown.Verdict, shown.Class = "not met", "bad"
			if *p.Met {
				c.Met++
				shown.Verdict, shown.Class = "met", "good"
			}
		}
		c.Claims = append(c.Claims, shown)
	}
}

// agreement returns a sentence about how far measured and simulated means are apart: in the median
// of all cases and points, and at most. It is empty if nothing was simulated.
func (f *folder) agreement() string {
	var sizes []float64
	var worst float64
	var where string
	for _, name := range f.Cases {
		for _, x := range f.Points {
			e, ok := deviation(f.runs(name, x))
			if !ok {
				continue
			}
			sizes = append(sizes, math.Abs(e.Value))
			if where == "" || math.Abs(e.Value) > math.Abs(worst) {
				worst, where = e.Value, name+" at "+pointName(f.Axis, x)
			}
		}
	}
	if len(sizes) == 0 {
		return ""
	}
	slices.Sort(sizes)
	return fmt.Sprintf("Measured means differ from those of the simulator by %.1f%% in the median, "+
		"and at most by %s%% (%s).",
		(sizes[(len(sizes)-1)/2]+sizes[len(sizes)/2])/2, withSign(worst), where)
}

// orders returns, for each point, the order of the cases from the best to the worst.
func (f *folder) orders() (all []order) {
	if !f.ComparesTimes() {
		return nil
	}
	for _, x := range f.Points {
		if steps := f.Order(x); len(steps) > 0 {
			all = append(all, order{pointName(f.Axis, x), steps})
		}
	}
	return all
}

// rows returns a row for each case at each point that has runs.
func (f *folder) rows() (rows []row) {
	for _, name := range f.Cases {
		first := true
		for _, x := range f.Points {
			if runs := f.runs(name, x); len(runs) > 0 {
				r := f.rowOf(runs)
				r.Case, r.Point, r.First = name, pointName(f.Axis, x), first
				rows, first = append(rows, r), false
			}
		}
	}
	return rows
}

// rowOf sums up the runs of a case at a point.
func (f *folder) rowOf(runs []*testbed.Run) row {
	r, mean := row{Runs: len(runs)}, measures[0]
	r.Times = timesOf(runs, measured, f.presentMeasures(), f.unit())
	r.Simulated = valueOf(estimate(runs, simulated, mean, f.unit()))
	r.Bound = valueOf(estimate(runs, bounded, mean, f.unit()))
	r.TimesBound = valueOf(timesBound(runs))
	model, ok := estimate(runs, modelled, mean, f.unit())
	model.Half = math.NaN() // seeds do not change the model, so there is no interval
	r.Model = valueOf(model, ok)
	if f.forwards() {
		r.Cycles = valueOf(f.Estimate("cycles", runs[0].Case, runs[0].Point), true)
		r.PerSecond = number(1e-6 / runs[0].Measured.Mean)
	}
	if f.holds() {
		r.FromEven = valueOf(fromEven(runs))
	}
	apart, ok := deviation(runs)
	r.Deviation, r.Far = signed(apart, ok), ok && math.Abs(apart.Value) > farOff
	kinds := map[string]uint64{}
	for _, run := range runs {
		r.Requests += run.Requests
		r.Failed += run.Failed
		for kind, n := range run.Failures {
			kinds[kind] += n
		}
	}
	if r.Failed > 0 {
		r.FailedShare = percent(float64(r.Failed) / float64(r.Requests))
	}
	var texts []string
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		if kinds[kind] > 0 {
			texts = append(texts, fmt.Sprintf("%s %d", kind, kinds[kind]))
		}
	}
	r.Failures = strings.Join(texts, ", ")
	return r
}

// presentMeasures returns the measures that at least one run has.
func (f *folder) presentMeasures() (some []measure) {
	for _, m := range measures {
		if f.any(m) {
			some = append(some, m)
		}
	}
	return some
}

// timesOf returns the values of measures.
func timesOf(runs []*testbed.Run, from source, of []measure, u unit) (times []value) {
	for _, m := range of {
		times = append(times, valueOf(estimate(runs, from, m, u)))
	}
	return times
}

// handshakes returns a row for each case at each point with times from SYN to SYN-ACK.
func (f *folder) handshakes() (rows []row) {
	for _, name := range f.Cases {
		first := true
		for _, x := range f.Points {
			runs := f.runs(name, x)
			if _, ok := estimate(runs, handshake, measures[0], milliseconds); ok {
				rows = append(rows, row{
					Case: name, Point: pointName(f.Axis, x), First: first,
					Times: timesOf(runs, handshake, measures, milliseconds),
				})
				first = false
			}
		}
	}
	return rows
}

// serverTables returns a table of the servers for each case, at the point with the longest response
// times.
func (f *folder) serverTables() (tables []serverTable) {
	points := f.shown()
	if len(points) == 0 {
		return nil
	}
	x := points[len(points)-1] // shown returns the point with the longest times last
	for _, name := range f.Cases {
		t := serverTable{Case: name, Point: pointName(f.Axis, x)}
		servers := serverShares(f.runs(name, x))
		sum := uint64(0)
		for _, s := range servers {
			sum += s.Responses
			t.Hunts = t.Hunts || s.Accepted+s.Refused+s.Forced > 0
			t.Adapts = t.Adapts || s.LastThreshold != nil
		}
		for _, s := range servers {
			threshold := unknown
			if s.LastThreshold != nil {
				threshold = fmt.Sprint(*s.LastThreshold)
			}
			t.Servers = append(t.Servers, serverRow{
				s, percent(float64(s.Responses) / float64(max(sum, 1))),
				number(1000 * s.Mean), number(s.Busy), threshold,
			})
		}
		if len(servers) > 0 {
			tables = append(tables, t)
		}
	}
	return tables
}

// described describes the cases. It returns nothing if this build cannot read the file of the
// experiment, which an earlier build wrote into the results.
func (f *folder) described() (cases []fact) {
	e, err := testbed.Parse(f.Experiment, []byte(f.Text))
	if err != nil {
		return nil
	}
	for _, c := range e.Cases {
		cases = append(cases, fact{c.Name, c.Describe()})
	}
	return cases
}

// facts describe the environment, and the length and the number of the runs.
func (f *folder) facts() []fact {
	e := f.Environment
	length := "default"
	if f.Full {
		length = "full: the values under full in the file"
	}
	facts := []fact{
		{"Segue", cmp.Or(e.Version, unknown)},
		{"Kernel", cmp.Or(e.Kernel, unknown)},
		{"CPU", fmt.Sprintf("%s, %s, %.0f GiB of memory", cmp.Or(e.CPU, "unknown"),
			wording.Count(e.Cores, "core"), float64(e.Memory)/(1<<30))},
		{"Speed", plain(f.Speed) + " × real time"},
		{"Length", length},
		{"Seeds", fmt.Sprint(f.Seeds)},
		{"Runs", fmt.Sprintf("%d of %d", len(f.Runs), f.Planned)},
	}
	if !e.Started.IsZero() {
		when := e.Started.UTC().Format("2 January 2006, 15:04 UTC")
		if !e.Finished.IsZero() {
			when += " to " + e.Finished.UTC().Format("2 January 2006, 15:04 UTC")
		}
		facts = append(facts, fact{"Date", when})
	}
	return facts
}
