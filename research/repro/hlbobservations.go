// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"

	"gonum.org/v1/gonum/stat"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
)

// hlb13 compares placements that look at all servers with those that look at two random ones.
func hlb13(ctx context.Context, r *run) error {
	rivals, err := rivals("GSQ", "GSQ2", "LSQ", "LSQ2", "SED", "SED2", "HLB", "HLB2", "Oracle", "Oracle2")
	if err != nil {
		return err
	}
	clusters, axis := balancerClusters(4, 8)
	c, err := r.compete(ctx, settings(clusters, 0.9, rivals), r.hlbRuns())
	if err != nil {
		return err
	}
	r.drawFCT(c, "FCT at 90%, all servers or two of them", axis, false)
	for i, balancers := range []string{", 4 balancers", ", 8 balancers"} {
		for _, name := range []string{"GSQ", "LSQ", "HLB"} {
			r.shorter(c, i, name, name+"2", balancers)
		}
	}
	r.shorter(c, 1, "SED2", "SED", ", 8 balancers")
	return nil
}

// hlb14 draws HLB's weights, and the queues of the two halves, by the number of balancers.
func hlb14(ctx context.Context, r *run) error {
	clusters, axis := balancerClusters(1, 2, 4, 8)
	weights := chart.Chart{Title: "Weights that HLB gives the halves, 90%", X: axis.axis, Y: chart.Axis{Label: "ratio of weights"}}
	for _, norm := range hlbNorms {
		ratios, err := r.weightRatios(ctx, clusters, 0.9, norm.parameter)
		if err != nil {
			return err
		}
		weights.Series = append(weights.Series, chart.Series{Name: norm.name, Style: chart.Bars, Points: estimates(ratios)})
	}
	r.draw(weights)
	r.remark("%s", normsDiffer)

	rivals, err := rivals("SED", "HLB")
	if err != nil {
		return err
	}
	for _, load := range []float64{0.7, 0.9} {
		c, err := r.compete(ctx, settings(clusters, load, rivals), r.hlbRuns())
		if err != nil {
			return err
		}
		r.draw(c.chart(fmt.Sprintf("Queues of the powerful half over those of the other, %.0f%%", 100*load), axis,
			chart.Axis{Label: "ratio of flows on a server"}, queueRatio))
		if load == 0.9 {
			shares := c.chart("Flows that the powerful half gets, 90%", axis,
				chart.Axis{Label: "share of flows", Max: 1}, powerful)
			shares.Series = append(shares.Series, printed("SED", chart.Point{X: 3, Y: 0.742}))
			r.draw(shares)
			share := times(powerful(c.of(3, "SED")), 100)
			r.about("flows that SED gives the powerful half, 8 balancers, %", "74.2", share.Value,
				sampled(share, r.hlbRuns(), hlbPaperRuns), "")
		}
	}
	return nil
}

// hlb15 compares what balancers assume about servers with the true state, with eight balancers.
func hlb15(ctx context.Context, r *run) error {
	rivals, err := rivals("SED", "HLB")
	if err != nil {
		return err
	}
	clusters, _ := balancerClusters(8)
	beliefs := make([]belief, len(rivals))
	list := settings(clusters, 0.9, rivals)
	list[0].watch = func(c *sim.Config, rival int) {
		c.SampleInterval = 2
		c.Sample = func(_ int, _ float64, w sim.World) { beliefs[rival].look(w) }
	}
	if _, err := r.compete(ctx, list, 1); err != nil {
		return err
	}
	var correlations []float64
	for i, rival := range rivals {
		b := &beliefs[i]
		correlation := stat.Correlation(b.work, b.score, nil)
		c := chart.Chart{
			Title:  fmt.Sprintf("%s: score by remaining work, correlation %.2f", rival.name, correlation),
			X:      chart.Axis{Label: "time to do the work that the server has, over the mean"},
			Y:      chart.Axis{Label: "score at a balancer, over the mean"},
			Series: []chart.Series{{Name: "1 processor", Style: chart.Marks}, {Name: "2 processors", Style: chart.Marks}},
		}
		for j := 0; j < len(b.work); j += 1 + len(b.work)/600 { // at most 600 points
			series := &c.Series[b.group[j]]
			series.Points = append(series.Points, chart.Point{X: b.work[j], Y: b.score[j]})
		}
		r.draw(c)
		correlations = append(correlations, correlation)
	}
	r.smaller("correlation of SED's scores with the truth", "that of HLB's", correlations[0],
		correlations[1], "")
	return nil
}

// belief collects what balancers assume, and what is true. An element is about one server, one
// balancer and one time.
type belief struct {
	work  []float64 // time that the server needs for its work, over the mean of all servers
	score []float64 // score of the server on the balancer, over the mean on that balancer
	group []int32   // half of the server
}

// look adds an element for each server and balancer at the present time. All balancers must have
// placements with scores.
func (b *belief) look(w sim.World) {
	n := w.Servers()
	work := make([]float64, n)
	for s := range work {
		work[s] = w.Work(int32(s)) / w.Server(int32(s)).Capacity()
	}
	meanWork := stat.Mean(work, nil)
	for i := range w.Balancers() {
		scored := w.Placement(int32(i)).(interface{ Score(server int32) float64 })
		scores := make([]float64, n)
		for s := range scores {
			scores[s] = scored.Score(int32(s))
		}
		meanScore := stat.Mean(scores, nil)
		for s := range scores {
			b.work = append(b.work, work[s]/meanWork)
			b.score = append(b.score, scores[s]/meanScore)
			b.group = append(b.group, w.Server(int32(s)).Group)
		}
	}
}
