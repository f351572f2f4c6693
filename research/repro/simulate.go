// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"math"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
)

// simulate runs configurations. Run i has the same flows in all of them.
func (r *run) simulate(ctx context.Context, configs []*sim.Config, runs int) ([]*sim.Result, error) {
	return sim.RunAll(ctx, configs, sim.Options{
		Seed: r.Seed, Runs: runs, Parallel: r.Workers,
		Progress: func(done, total int) { r.tell("%s: %d of %d", r.figure, done, total) },
	})
}

// ratioOf returns the ratio of a value in result a to that in b: the mean of the ratios of single
// runs. Run i has the same flows in both.
func ratioOf(a, b *sim.Result, value func(*sim.RunResult) float64) sim.Estimate {
	ratios := make([]float64, len(a.Runs))
	for i := range ratios {
		ratios[i] = value(a.Runs[i]) / value(b.Runs[i])
	}
	return sim.EstimateOf(ratios)
}

func meanOfRun(run *sim.RunResult) float64 { return run.Response.Mean() }

func p90OfRun(run *sim.RunResult) float64 { return run.Response.Quantile(0.9) }

// largestRatio compares two lists of results. It returns the largest ratio of the mean response
// time of a[i] to that of b[i], and the index i.
func largestRatio(a, b []*sim.Result) (at int, largest sim.Estimate) {
	for i := range a {
		if e := ratioOf(a[i], b[i], meanOfRun); i == 0 || e.Value > largest.Value {
			at, largest = i, e
		}
	}
	return at, largest
}

// times multiplies an estimate by a factor, such as 100 for percent.
func times(e sim.Estimate, factor float64) sim.Estimate {
	return sim.Estimate{Value: e.Value * factor, Half: e.Half * factor}
}

// estimated is a point with the confidence interval as error bar. The value cannot be negative, so
// the interval is cut off at 0.
func estimated(x float64, e sim.Estimate) chart.Point {
	if math.IsNaN(e.Half) {
		return chart.Point{X: x, Y: e.Value}
	}
	return chart.Point{X: x, Y: e.Value, Low: max(e.Value-e.Half, 0), High: e.Value + e.Half}
}

// estimates returns a point for each estimate, at 0, 1, 2 and so on.
func estimates(list []sim.Estimate) []chart.Point {
	points := make([]chart.Point, len(list))
	for i, e := range list {
		points[i] = estimated(float64(i), e)
	}
	return points
}

// cdf returns the cumulative distribution of response times up to the given time, as a series.
func cdf(name string, style chart.Style, result *sim.Result, longest float64) chart.Series {
	s := chart.Series{Name: name, Style: style}
	for i := range 201 {
		x := longest * float64(i) / 200
		s.Points = append(s.Points, chart.Point{X: x, Y: result.Response.Below(x)})
	}
	return s
}
