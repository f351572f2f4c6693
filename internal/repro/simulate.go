// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"math"

	"github.com/segue-lb/segue/internal/chart"
	"github.com/segue-lb/segue/internal/sim"
)

// inOrder is the reason for a missing tolerance: the text only states which result is better.
const inOrder = "an order, without a number"

// simulate runs configurations with common random numbers.
func (r *run) simulate(ctx context.Context, configs []*sim.Config, runs int) ([]*sim.Result, error) {
	return sim.RunAll(ctx, configs, sim.Options{
		Seed: r.Seed, Runs: runs, Parallel: r.Workers,
		Progress: func(done, total int) { r.tell("%s: %d of %d", r.figure, done, total) },
	})
}

// estimated is a point with the confidence interval as error bar. Quick figures have two or four
// runs, and the intervals of so few runs would be many times the error. So they have no error
// bars.
func (r *run) estimated(x float64, e sim.Estimate) chart.Point {
	if r.Quick || math.IsNaN(e.Half) {
		return chart.Point{X: x, Y: e.Value}
	}
	return chart.Point{X: x, Y: e.Value, Low: e.Value - e.Half, High: e.Value + e.Half}
}

// cdf draws the distribution of response times up to the given time.
func cdf(name string, style chart.Style, result *sim.Result, longest float64) chart.Series {
	s := chart.Series{Name: name, Style: style}
	for i := range 201 {
		x := longest * float64(i) / 200
		s.Points = append(s.Points, chart.Point{X: x, Y: result.Response.Below(x)})
	}
	return s
}
