// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"math"
	"sync"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// hlbNorms are the norms by which HLB divides durations before they become weights. parameter is
// placement.Weights.Norm. The paper divides by the sum.
var hlbNorms = []struct{ name, parameter string }{{"over the sum", ""}, {"over the mean", "mean"}}

const normsDiffer = "The paper's formula divides durations by their sum. So with 128 servers, all " +
	"weights exp(-μ) are within about 1% of each other. If durations are divided by their mean, " +
	"the weights differ more."

// weighing is the placement HLB on one balancer, with the methods that a sample calls.
type weighing interface {
	Weight(server int32) float64
	Gain(server int32) float64
}

// weighings calls see for each server on each balancer. All balancers must run HLB.
func weighings(w sim.World, see func(server int32, hlb weighing)) {
	for b := range w.Balancers() {
		hlb := w.Placement(int32(b)).(weighing)
		for s := range w.Servers() {
			see(int32(s), hlb)
		}
	}
}

// weightRatios simulates HLB. For each cluster it returns the weights of the second half of the
// servers, divided by those of the first half. Both are sums over all samples of a run. norm
// selects by what durations are divided (placement.Weights.Norm): by default their sum, as in the
// paper's formula.
func (r *run) weightRatios(
	ctx context.Context, clusters []hlbCluster, load float64, norm string,
) ([]sim.Estimate, error) {
	hlb, err := hlbWith("HLB", func(w *placement.Weights) { w.Norm = norm })
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex                           // several runs are sampled at the same time
	sums := make([][][2]float64, len(clusters)) // by cluster, run and half
	list := settings(clusters, load, []rival{hlb})
	for i := range list {
		sums[i] = make([][2]float64, r.hlbRuns())
		list[i].watch = func(c *sim.Config, _ int) {
			c.SampleInterval = 5
			c.Sample = func(run int, _ float64, world sim.World) {
				mu.Lock()
				defer mu.Unlock()
				weighings(world, func(s int32, hlb weighing) {
					sums[i][run][world.Server(s).Group] += hlb.Weight(s)
				})
			}
		}
	}
	if _, err := r.compete(ctx, list, r.hlbRuns()); err != nil {
		return nil, err
	}
	ratios := make([]sim.Estimate, len(clusters))
	for i := range sums {
		var ofRuns []float64
		for _, sum := range sums[i] {
			ofRuns = append(ofRuns, sum[1]/sum[0])
		}
		ratios[i] = sim.EstimateOf(ofRuns)
	}
	return ratios, nil
}

// gains collects HLB's Kalman gains over time, from all servers, balancers and runs. At each step
// the gain determines how far a measurement moves the estimate.
type gains struct {
	mu          sync.Mutex // several runs are sampled at the same time
	sums, count []float64  // sum and number of the gains of each sample
}

// gainInterval is the time in seconds between two samples of the gains.
const gainInterval = 5

// watch makes the runs of a configuration add their gains.
func (g *gains) watch(c *sim.Config) {
	c.SampleInterval = gainInterval
	c.Sample = func(_ int, now float64, world sim.World) {
		g.mu.Lock()
		defer g.mu.Unlock()
		at := int(math.Round(now/gainInterval)) - 1
		for len(g.sums) <= at {
			g.sums, g.count = append(g.sums, 0), append(g.count, 0)
		}
		weighings(world, func(s int32, hlb weighing) {
			g.sums[at] += hlb.Gain(s)
			g.count[at]++
		})
	}
}

// after returns the mean gain at a number of seconds after the start, which must be a multiple of
// gainInterval.
func (g *gains) after(seconds float64) float64 {
	at := int(math.Round(seconds/gainInterval)) - 1
	return g.sums[at] / g.count[at]
}

// series returns the mean gains from the first sample to the last.
func (g *gains) series(name string, style chart.Style) chart.Series {
	s := chart.Series{Name: name, Style: style}
	for i := range g.sums {
		x := float64(i+1) * gainInterval
		s.Points = append(s.Points, chart.Point{X: x, Y: g.after(x)})
	}
	return s
}
