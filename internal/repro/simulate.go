// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"math"

	"github.com/segue-lb/segue/internal/chart"
	"github.com/segue-lb/segue/internal/sim"
)

// inOrder is why there is no tolerance where the text says no more than which is better.
const inOrder = "an order, without a number"

// simulate runs configurations, each as often as said, with common random numbers.
func (r *run) simulate(ctx context.Context, configs []*sim.Config, runs int) ([]*sim.Result, error) {
	return sim.RunAll(ctx, configs, sim.Options{
		Seed: r.Seed, Runs: runs, Parallel: r.Workers,
		Progress: func(done, total int) { r.tell("%s: %d of %d", r.figure, done, total) },
	})
}

// estimated is a point with the confidence interval as error bar. Of the two or four runs of a quick
// figure that would be many times what the value is off by, so there it is left out.
func (r *run) estimated(x float64, e sim.Estimate) chart.Point {
	if r.Quick || math.IsNaN(e.Half) {
		return chart.Point{X: x, Y: e.Value}
	}
	return chart.Point{X: x, Y: e.Value, Low: e.Value - e.Half, High: e.Value + e.Half}
}

// cdf is the distribution of response times up to the longest one asked for.
func cdf(name string, style chart.Style, result *sim.Result, longest float64) chart.Series {
	s := chart.Series{Name: name, Style: style}
	for i := range 201 {
		x := longest * float64(i) / 200
		s.Points = append(s.Points, chart.Point{X: x, Y: result.Response.Below(x)})
	}
	return s
}
