// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/testbed"
	"github.com/segue-lb/segue/research/tolerance"
)

// figure is a chart with the end of the name of its file.
type figure struct {
	name  string
	chart chart.Chart
}

// section is a part of the report of an experiment.
type section struct {
	title, note string
	// pairs tells that each point has two figures, which the page shows beside each other.
	pairs   bool
	figures []figure
	// rest are figures that the page hides until readers open them.
	rest []figure
}

// point is a point of a chart, with its confidence interval.
func point(x float64, e sim.Estimate) chart.Point {
	p := chart.Point{X: x, Y: e.Value, Low: e.Value, High: e.Value}
	if !math.IsNaN(e.Half) {
		p.Low, p.High = max(e.Value-e.Half, 0), e.Value+e.Half
	}
	return p
}

// axis is the horizontal axis of charts over all points.
func (f *folder) axis() chart.Axis {
	first, last := f.Points[0], f.Points[len(f.Points)-1]
	return chart.Axis{Label: f.Axis.Label, Log: first > 0 && last >= 50*first}
}

// responses has charts of the response times over the points, or of the cases if there is a single
// point.
func (f *folder) responses() section {
	s := section{title: f.subject(), note: f.intervals()}
	if f.hasSimulation() {
		s.note += " The simulator replays the same requests."
	}
	for _, m := range measures {
		c := f.overall(m, f.unit())
		if m.name != "p50" && f.any(m) { // the table has the median
			c.Title, c.Y.Label = f.subject()+": "+strings.ToLower(m.title), m.name+", "+f.unit().Name
			s.figures = append(s.figures, figure{m.name, c})
		}
	}
	return s
}

// overall has a chart of a measure over the points, or of the cases if there is a single point.
// Crosses mark the numbers of the paper.
func (f *folder) overall(m measure, u unit) chart.Chart {
	draw := f.overPoints
	if len(f.Points) == 1 {
		draw = f.overCases
	}
	c := draw(m, u)
	for _, claim := range f.Claims {
		if s := f.stated(&claim, m, u); len(s.Points) > 0 {
			c.Series = append(c.Series, s)
		}
	}
	return c
}

// stated returns a cross for each point of a claim with a number of the paper about a measure. The
// number may be a ratio of two cases. Then the cross is at its product with the measured value of
// the other case.
func (f *folder) stated(claim *testbed.Claim, m measure, u unit) chart.Series {
	const kind = "stated in the paper"
	s := chart.Series{Name: claim.Of + ", " + kind, Like: claim.Of, Kind: kind, Style: chart.Crosses}
	number, err := tolerance.Parse(claim.Paper)
	if err != nil || number.Relation != tolerance.About || claim.Paper == tolerance.Equal ||
		claim.Quantity != m.name || claim.Type != "" || claim.Minus != "" {
		return s
	}
	for _, x := range f.Points {
		if claim.At != 0 && claim.At != x {
			continue
		}
		one, ok := sim.Estimate{Value: u.factor}, true
		if claim.Over != "" {
			one, ok = estimate(f.runs(claim.Over, cmp.Or(claim.OverAt, x)), measured, m, u)
		}
		if len(f.Points) == 1 {
			x = float64(slices.Index(f.Cases, claim.Of))
		}
		if ok {
			s.Points = append(s.Points, chart.Point{X: x, Y: number.Value * one.Value})
		}
	}
	return s
}

// intervals explains the error bars, or returns an empty string if there are none.
func (f *folder) intervals() string {
	switch {
	case f.Seeds < 2 && !f.hasSimulation(): // there are none
		return ""
	case f.Seeds < 2:
		return "Error bars are 95% confidence intervals."
	}
	return "Error bars are 95% confidence intervals over " + wording.Count(f.Seeds, "seed") + "."
}

func (f *folder) hasSimulation() bool {
	return slices.ContainsFunc(f.Runs, func(run testbed.Run) bool { return run.Simulated != nil })
}

// subject names the quantity that the experiment measures.
func (f *folder) subject() string {
	if f.forwards() {
		return "CPU time of a packet"
	}
	return "Response times"
}

// any tells whether a run has a value of the measure.
func (f *folder) any(m measure) bool {
	return slices.ContainsFunc(f.Runs, func(run testbed.Run) bool { return m.of(&run.Measured) > 0 })
}

// ways are the ways to find response times: to measure, to simulate, and to compute by the model.
// style is that of the lines in charts over points.
var ways = []struct {
	kind  string
	from  source
	style chart.Style
}{
	{"", measured, chart.Marked},
	{"simulated", simulated, chart.Dashed},
	{"model", modelled, chart.Dotted},
}

// overPoints draws a measure over the points, with a line for each case and each of the ways.
func (f *folder) overPoints(m measure, u unit) chart.Chart {
	c := chart.Chart{X: f.axis()}
	for _, way := range ways {
		for i, name := range f.Cases {
			series := chart.Series{Name: name, Style: way.style, Look: i + 1}
			if way.kind != "" {
				series.Name, series.Kind, series.Like = name+", "+way.kind, way.kind, name
			}
			for _, x := range f.Points {
				if e, ok := estimate(f.runs(name, x), way.from, m, u); ok {
					series.Points = append(series.Points, point(x, e))
				}
			}
			if way.kind == "" { // even without points, because the other ways are like this series
				c.Series = append(c.Series, series)
			} else if len(series.Points) > 0 {
				c.Series = append(c.Series, withoutErrors(series))
			}
		}
	}
	return c
}

// withoutErrors removes error bars, which would cover those of the measured values.
func withoutErrors(s chart.Series) chart.Series {
	for i, p := range s.Points {
		s.Points[i] = chart.Point{X: p.X, Y: p.Y}
	}
	return s
}

// overCases draws a measure of each case at the only point: the measured and the simulated value as
// bars beside each other, and the model's as a cross. A case has the colour that it has in other
// charts.
func (f *folder) overCases(m measure, u unit) chart.Chart {
	c := chart.Chart{X: chart.Axis{Categories: f.Cases, Label: pointName(f.Axis, f.Points[0])}}
	for _, way := range ways {
		for i, name := range f.Cases {
			e, ok := estimate(f.runs(name, f.Points[0]), way.from, m, u)
			if !ok {
				continue
			}
			series := chart.Series{
				Name: name, Look: i + 1, Style: chart.Bars, Kind: cmp.Or(way.kind, "measured"),
				Points: []chart.Point{point(float64(i), e)},
			}
			if way.kind != "" {
				series.Name, series.Like = name+", "+way.kind, name
			}
			if way.kind == "model" {
				series.Style = chart.Crosses
				series = withoutErrors(series)
			}
			c.Series = append(c.Series, series)
		}
	}
	return c
}

// shown returns the points that are shown in detail. It sorts the points that have runs by their
// longest mean response time, and returns the middle one and the last one. If there are one or two
// points, it returns all.
func (f *folder) shown() []float64 {
	longest := map[float64]float64{}
	for i := range f.Runs {
		run := &f.Runs[i]
		longest[run.Point] = max(longest[run.Point], run.Measured.Mean)
	}
	var points []float64
	for _, p := range f.Points {
		if _, ok := longest[p]; ok {
			points = append(points, p)
		}
	}
	slices.SortStableFunc(points, func(a, b float64) int {
		return cmp.Compare(longest[a], longest[b])
	})
	if n := len(points); n > 2 {
		points = []float64{points[(n-1)/2], points[n-1]}
	}
	return points
}

// inDetail makes figures for each point with the function draw. It adds the point to their names
// and titles. shown are the figures of the points that the page shows in detail, and rest those of
// the other points.
func (f *folder) inDetail(
	draw func(x float64) ([]figure, error),
) (shown, rest []figure, err error) {
	detailed := f.shown()
	for _, x := range f.Points {
		figures, err := draw(x)
		if err != nil {
			return nil, nil, err
		}
		for i := range figures {
			figures[i].name += "-" + plain(x)
			figures[i].chart.Title += ", " + pointName(f.Axis, x)
		}
		if slices.Contains(detailed, x) {
			shown = append(shown, figures...)
		} else {
			rest = append(rest, figures...)
		}
	}
	return shown, rest, nil
}

// distributions has a chart of the distribution of times for each point.
func (f *folder) distributions(title, chartTitle, name string, of ...source) section {
	s := section{title: title}
	s.figures, s.rest, _ = f.inDetail(func(x float64) ([]figure, error) {
		c := f.distribution(x, of)
		c.Title = chartTitle
		if len(c.Series) == 0 {
			return nil, nil
		}
		return []figure{{name, c}}, nil
	})
	return s
}

// cutOff is the share of the requests of the slowest case that a chart of distributions shows. The
// slowest requests would take more room than all others.
const cutOff = 0.98

// distribution draws the distributions at a point. The lines of the first source are solid. Lines
// of the source with index i have the style of ways[i].
func (f *folder) distribution(x float64, of []source) chart.Chart {
	c := chart.Chart{
		X: chart.Axis{Label: "time, ms"},
		Y: chart.Axis{Label: "share of requests", Max: 1},
	}
	longest := 0.0
	for _, name := range f.Cases {
		for _, run := range f.runs(name, x) {
			if r := of[0](run); r != nil {
				longest = max(longest, timeOf(r.Distribution, cutOff))
			}
		}
	}
	for i, from := range of {
		for look, name := range f.Cases {
			series := chart.Series{
				Name: name, Look: look + 1, Points: cumulated(f.runs(name, x), from, longest),
			}
			if i > 0 {
				series.Style, series.Kind, series.Like = ways[i].style, ways[i].kind, name
				series.Name += ", " + series.Kind
			}
			if len(series.Points) > 0 {
				c.Series = append(c.Series, series)
			}
		}
	}
	return c
}

// cumulated is the mean of the distributions of runs with different seeds, up to a time in seconds.
func cumulated(runs []*testbed.Run, from source, longest float64) (points []chart.Point) {
	var distributions [][]testbed.DistributionPoint
	for _, run := range runs {
		if r := from(run); r != nil && len(r.Distribution) > 0 {
			distributions = append(distributions, r.Distribution)
		}
	}
	if len(distributions) == 0 || longest == 0 {
		return nil
	}
	const steps = 150
	for i := range steps + 1 {
		seconds := longest * float64(i) / steps
		share := 0.0
		for _, d := range distributions {
			share += shareOf(d, seconds) / float64(len(distributions))
		}
		points = append(points, chart.Point{X: 1000 * seconds, Y: share})
	}
	return points
}

// shareOf returns the share of the requests that took at most a time. Between the points of a
// distribution it interpolates.
func shareOf(d []testbed.DistributionPoint, seconds float64) float64 {
	// i is the index of the first point after the time.
	i, _ := slices.BinarySearchFunc(d, seconds, func(p testbed.DistributionPoint, t float64) int {
		if p.Seconds <= t {
			return -1
		}
		return 1
	})
	switch {
	case i == 0:
		return 0
	case i == len(d):
		return d[i-1].Share
	}
	a, b := d[i-1], d[i]
	return a.Share + (b.Share-a.Share)*(seconds-a.Seconds)/(b.Seconds-a.Seconds)
}

// timeOf returns the time in seconds within which a share of the requests was served.
func timeOf(d []testbed.DistributionPoint, share float64) float64 {
	for _, p := range d {
		if p.Share >= share {
			return p.Seconds
		}
	}
	if len(d) > 0 {
		return d[len(d)-1].Seconds
	}
	return 0
}

// overTime has charts of the servers' loads over the first run of each case.
func (f *folder) overTime() (section, error) {
	s := section{
		title: "Load over time", pairs: true,
		note: "Busy workers of a server, and how evenly they are distributed (1: evenly), in the run " +
			"with the first seed. Both are smoothed by an exponential moving average with a time " +
			"constant of 1 s, as in 6LB, footnote 6.",
	}
	var err error
	s.figures, s.rest, err = f.inDetail(func(x float64) ([]figure, error) {
		busy := chart.Chart{Title: "Busy workers", Y: chart.Axis{Label: "mean over the servers"}}
		fairness := chart.Chart{
			Title: "Fairness", Y: chart.Axis{Label: "Jain’s index of busy workers", Max: 1},
		}
		for i, name := range f.Cases {
			runs := withFiles(f.runs(name, x))
			if len(runs) == 0 {
				continue
			}
			l, err := readLoads(f.file(runs[0], "loads.csv"))
			if err != nil {
				return nil, err
			}
			busy.Series = append(busy.Series, chart.Series{
				Name: name, Look: i + 1, Points: thinned(l.times, smooth(l.times, l.busy)),
			})
			fairness.Series = append(fairness.Series, chart.Series{
				Name: name, Look: i + 1, Points: thinned(l.times, smooth(l.times, l.fairness)),
			})
		}
		if len(busy.Series) == 0 {
			return nil, nil
		}
		labelTime(&busy, &fairness)
		return []figure{{"busy", busy}, {"fairness", fairness}}, nil
	})
	return s, err
}

// thinned returns the points of a line over time, about 400 at most. Each is the mean of the same
// number of values, except perhaps the last.
func thinned(times, values []float64) (points []chart.Point) {
	size := 1 + len(times)/400
	for i := 0; i < len(times); i += size {
		end := min(i+size, len(times))
		var p chart.Point
		for j := i; j < end; j++ {
			p.X += times[j] / float64(end-i)
			p.Y += values[j] / float64(end-i)
		}
		points = append(points, p)
	}
	return points
}

// labelTime labels the horizontal axis of charts over seconds, and ends it at the last value of all
// charts. If the last value is more than two hours, it changes seconds to hours.
func labelTime(charts ...*chart.Chart) {
	last := 0.0
	for _, c := range charts {
		for _, s := range c.Series {
			for _, p := range s.Points {
				last = max(last, p.X)
			}
		}
	}
	unit, label := 1.0, "time, s"
	if last > 2*3600 { // seconds
		unit, label = 3600, "time, h"
	}
	for _, c := range charts {
		c.X.Label = label
		c.X.Max = last / unit
		for _, s := range c.Series {
			for i := range s.Points {
				s.Points[i].X /= unit
			}
		}
	}
}
