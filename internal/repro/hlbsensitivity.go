// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/chart"
	"github.com/segue-lb/segue/internal/sim"
	"github.com/segue-lb/segue/internal/sim/placement"
)

func hlb17(ctx context.Context, r *run) error {
	const ms = time.Millisecond
	intervals := []time.Duration{100 * ms, 250 * ms, 500 * ms, 1000 * ms, 2000 * ms}
	x := places{axis: chart.Axis{Label: "interval between updates, s"}}
	gained := make([]gains, len(intervals))
	var list []setting
	for i, interval := range intervals {
		x.at = append(x.at, interval.Seconds())
		hlb, err := hlbWith("HLB", func(w *placement.Weights) { w.Interval = interval })
		if err != nil {
			return err
		}
		awcmp := rival{"AWCMP", &placement.AWCMP{Polled: placement.Polled{Interval: interval}}}
		list = append(list, setting{
			cluster: newHLBCluster(), load: 0.9, rivals: []rival{awcmp, hlb},
			watch: func(c *sim.Config, rival int) {
				if rival == 1 {
					gained[i].watch(c)
				}
			},
		})
	}
	c, err := r.compete(ctx, list, r.hlbRuns())
	if err != nil {
		return err
	}
	r.drawFCT(c, "FCT at 90% by interval", x, false)
	gain := gainChart("Kalman gain of HLB by interval")
	for i, interval := range intervals {
		gain.Series = append(gain.Series, gained[i].series(fmt.Sprintf("%v s", interval.Seconds()), chart.Line))
	}
	r.draw(gain)

	last := len(intervals) - 1
	slower := func(name string) float64 { return c.mean(last, name) / c.mean(0, name) }
	r.before("AWCMP every 0.1 s", "every 2 s", c.mean(0, "AWCMP"), c.mean(last, "AWCMP"), 0, inOrder)
	r.before("what 2 s instead of 0.1 s cost HLB", "AWCMP", slower("HLB"), slower("AWCMP"), 0, "less affected, says the text")
	const after = 100
	r.before(fmt.Sprintf("Kalman gain every 2 s, after %d s", after), "every 0.1 s", gained[last].after(after), gained[0].after(after), 0,
		"short intervals have higher gains, says the text; but the gain of the filter as printed falls with every step, and they have more steps")
	r.remark("The text does not say which five intervals the paper has.")
	return nil
}

func gainChart(title string) chart.Chart {
	return chart.Chart{Title: title, X: chart.Axis{Label: "time, s"}, Y: chart.Axis{Label: "Kalman gain", Log: true}}
}

// gainsCompared is the time from the start at which figure 18b compares the gains, in seconds.
const gainsCompared = 60

// hlb18 draws results for three distributions of work, and the gains of HLB's filter.
func hlb18(ctx context.Context, r *run) error {
	rivals, err := rivals("HLB-FIX", "HLB", "Oracle")
	if err != nil {
		return err
	}
	overMean, err := hlbWith("HLB over the mean", func(w *placement.Weights) { w.Norm = "mean" })
	if err != nil {
		return err
	}
	rivals = append(rivals, overMean)
	watched := []int{0, 1, 3} // the rivals with a Kalman filter
	works := []float64{0.25, 0.5, 1}
	gained := make([][]gains, len(works)) // by distribution and rival
	axis := categories("mean work of a flow, lognormal", "0.25 s", "0.5 s", "1 s")
	var list []setting
	for i, work := range works {
		cluster := newHLBCluster()
		cluster.jobs[0].Work = sim.LognormalMoments(work, work)
		gained[i] = make([]gains, len(rivals))
		list = append(list, setting{cluster: cluster, load: 0.9, rivals: rivals, watch: func(c *sim.Config, rival int) {
			if slices.Contains(watched, rival) {
				gained[i][rival].watch(c)
			}
		}})
	}
	c, err := r.compete(ctx, list, r.hlbRuns())
	if err != nil {
		return err
	}
	r.drawFCT(c, "FCT at 90%", axis, false)
	for _, rival := range watched {
		gain := gainChart("Kalman gain, " + rivals[rival].name)
		for i, name := range axis.axis.Categories {
			gain.Series = append(gain.Series, gained[i][rival].series(name, chart.Line))
		}
		r.draw(gain)
	}
	last := len(works) - 1
	r.shorter(c, last, "HLB", "HLB-FIX", ", longest flows", inOrder)
	r.remark("The text does not state the parameters of the three lognormal distributions; here their deviation is their mean.")
	r.remark("HLB's gains, says the text, converge differently for each distribution. After %d s they are %s here, and %s over the mean: "+
		"the filter as printed expects no change of what it estimates, so that its gain follows from the number of steps. %s",
		gainsCompared, gainsAfter(gained, 1), gainsAfter(gained, 3), normsDiffer)
	return nil
}

// gainsAfter returns the gains of a rival after that time, for each distribution.
func gainsAfter(gained [][]gains, rival int) string {
	var list []string
	for i := range gained {
		list = append(list, fmt.Sprintf("%.4f", gained[i][rival].after(gainsCompared)))
	}
	return strings.Join(list, ", ")
}

func hlb19(ctx context.Context, r *run) error {
	rivals, err := rivals("LSQ", "SED", "HLB", "HLB")
	if err != nil {
		return err
	}
	placed := &rivals[len(rivals)-1]
	placed.name = "HLB placed"
	placed.spec.(*placement.HLB).Count = placement.CountPlaced
	axis := categories("buckets of the flow table", "1024", "4096", "16384", "65536")
	var clusters []hlbCluster
	for _, buckets := range []int{1024, 4096, 16384, 65536} {
		c := newHLBCluster()
		c.servers, c.cpus = 256, [2]int32{2, 4}
		c.flowTable = sim.FlowTable{Buckets: buckets, Ways: 1}
		clusters = append(clusters, c)
	}
	for _, load := range []float64{0.7, 0.9} {
		c, err := r.compete(ctx, settings(clusters, load, rivals), r.hlbRuns())
		if err != nil {
			return err
		}
		r.drawFCT(c, fmt.Sprintf("FCT, 256 servers, %.0f%%", 100*load), axis, false)
		at := fmt.Sprintf(", 1024 buckets, %.0f%%", 100*load)
		r.shorter(c, 0, "HLB", "LSQ", at, inOrder)
		r.shorter(c, 0, "HLB", "SED", at, "HLB counts flows from their first data on (section IV-A2), SED here from the choice of a server on; counted alike HLB is better")
		r.shorter(c, 0, placed.name, "SED", at, "both count flows from the choice of a server on")
	}
	return nil
}
