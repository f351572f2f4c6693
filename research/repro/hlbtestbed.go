// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
)

// The testbed of HLB, section V-A, in the configuration 2x of table III: four servers with two
// processors, and three with four. Apache has 32 workers and a backlog of 128, and resets
// connections beyond that. The number of balancers is that of section VI-E2; figures 20 and 21 do
// not state theirs. The mean delay of a packet is half of the mean round trip of 0.322 ms.
const (
	hlbTestbedBalancers = 2
	hlbTestbedDelay     = 0.000161
)

// The demands of Wikipedia's pages, of a PHP loop and of files (figures 20, 21 and 23). That of the
// pages is ours: an exponential demand of 25 ms loads the processors with 85% at the 680 queries a
// second of section VI-C3. The loop is that of section VI-E1. The files have the sizes of footnote
// 13. The speed of the disk, 125 MB/s, is ours.
var (
	wikiDemand = []sim.Stage{{Queue: sim.CPU, Work: sim.Exponential(0.025)}}
	loopDemand = []sim.Stage{{Queue: sim.CPU, Work: sim.Exponential(0.2)}}
	fileDemand = []sim.Stage{{Queue: sim.IO, Work: sim.Empirical([]float64{
		0.1 / 125, 0.2 / 125, 0.5 / 125, 0.75 / 125, 1. / 125, 2. / 125, 5. / 125,
	})}}
)

const syntheticDemands = "The paper's testbed served Wikipedia's pages. The demands here are " +
	"synthetic: exponential with a mean of 25 ms, which loads the processors with 85% at the " +
	"paper's 680 queries a second."

// hlbTestbed returns the configuration of a run of one rival for the given number of seconds. The
// load is the share of the processors that the flows use, or of the disks if they read files.
func hlbTestbed(one rival, demand []sim.Stage, load, seconds float64) (*sim.Config, error) {
	method, _, err := one.spec.Build()
	if err != nil {
		return nil, err
	}
	delay := sim.Constant(hlbTestbedDelay)
	c := &sim.Config{
		Balancers: slices.Repeat([]sim.Share{{Weight: 1}}, hlbTestbedBalancers),
		Network: sim.Network{
			ClientBalancer: delay,
			BalancerServer: delay,
			ServerServer:   delay,
			ServerClient:   delay,
		},
		Jobs:      []sim.Job{{Share: 1, Stages: demand}},
		Placement: method, Duration: seconds, Warmup: 0.2,
	}
	for i, cpus := range []int32{2, 2, 2, 2, 4, 4, 4} {
		c.Servers = append(c.Servers, sim.Server{
			Name: fmt.Sprintf("server-%d", i), CPUs: cpus, Speed: 1, IOSpeed: 1,
			Group:      cpus/2 - 1, // 0 for two processors, 1 for four
			Discipline: sim.ProcessorSharing, Workers: 32, Backlog: 128,
		})
	}
	capacity := c.Capacity()
	if demand[0].Queue == sim.IO {
		capacity = float64(len(c.Servers))
	}
	c.Arrivals = sim.Poisson{Rate: load * capacity / demand[0].Work.Mean()}
	return c, nil
}

// onTestbed simulates rivals in several conditions. config returns the configuration of a rival in
// a condition.
func (r *run) onTestbed(
	ctx context.Context,
	rivals []rival,
	conditions int,
	config func(condition, rival int) (*sim.Config, error),
) (*contest, error) {
	var configs []*sim.Config
	for condition := range conditions {
		for i := range rivals {
			c, err := config(condition, i)
			if err != nil {
				return nil, err
			}
			configs = append(configs, c)
		}
	}
	results, err := r.simulate(ctx, configs, r.hlbRuns())
	if err != nil {
		return nil, err
	}
	return &contest{rivals, slices.Collect(slices.Chunk(results, len(rivals)))}, nil
}

// hlb20 adds delays between clients and servers.
func hlb20(ctx context.Context, r *run) error {
	rivals, err := rivals("LSQ", "SED", "HLB")
	if err != nil {
		return err
	}
	early, err := fromSYN("LSQ", "SED", "HLB")
	if err != nil {
		return err
	}
	all := append(rivals, early...)
	trips := []float64{0, 0.05, 0.1, 0.2} // mean added round trips, in seconds
	c, err := r.onTestbed(ctx, all, len(trips), func(condition, i int) (*sim.Config, error) {
		c, err := hlbTestbed(all[i], wikiDemand, 0.85, pick(r, 60.0, 200.0))
		if err == nil && trips[condition] > 0 {
			half := sim.LognormalMoments(trips[condition]/2, trips[condition]/10)
			c.Network.ClientBalancer, c.Network.ServerClient = half, half
		}
		return c, err
	})
	if err != nil {
		return err
	}
	r.draw(
		c.chart("Mean FCT by the clients' round trip",
			places{chart.Axis{Label: "mean added round trip, s"}, trips},
			chart.Axis{Label: meanFCT}, (*sim.Result).Mean),
	)
	worst, bend := 0.0, 1.0 // bend is the largest factor between the FCT and a straight line
	first, last := c.mean(0, "HLB"), c.mean(len(trips)-1, "HLB")
	for i, trip := range trips {
		worst = max(worst, c.mean(i, "HLB")/c.best(i, "HLB").Mean().Value)
		line := first + (last-first)*trip/trips[len(trips)-1]
		bend = max(bend, c.mean(i, "HLB")/line, line/c.mean(i, "HLB"))
	}
	r.atMost("largest HLB / best of LSQ and SED at any round trip", "1", worst, stated,
		"superior in all scenarios, says the text")
	r.because("SED knows the capacities, and HLB infers them. If all count flows from the SYN, HLB is " +
		"better than LSQ at all round trips, but takes 1.06 to 1.16 of SED's time")
	r.alike("largest FCT of HLB / straight line, or line / FCT", bend,
		"the FCT grows linearly with the round trip, says the text")
	r.remark("%s", syntheticDemands)
	r.remark("The text does not state the round trips. Their deviation here is a fifth of the " +
		"mean, lognormal and independent for each packet. A flow counts as established when " +
		"its client has answered. So counts are late by a round trip, and in that time new " +
		"flows go to the same server.")
	return nil
}

// hlb21 compares three sorts of demand at a moderate and a high load.
func hlb21(ctx context.Context, r *run) error {
	rivals, err := rivals(realRivals...)
	if err != nil {
		return err
	}
	demands := [][]sim.Stage{wikiDemand, loopDemand, fileDemand}
	loads := []float64{0.7, 0.9}
	c, err := r.onTestbed(
		ctx,
		rivals,
		len(demands)*len(loads),
		func(condition, i int) (*sim.Config, error) {
			// A condition is a demand and a load: the first conditions have the first demand.
			demand := demands[condition/len(loads)]
			// The duration is in proportion to the work of a flow, so that a processor or disk
			// serves the same number of flows, whatever the demand.
			seconds := pick(r, 2000.0, 8000.0) * demand[0].Work.Mean()
			return hlbTestbed(rivals[i], demand, loads[condition%len(loads)], seconds)
		},
	)
	if err != nil {
		return err
	}
	axis := categories("demand and load", "pages, 70%", "pages, 90%", "loop, 70%", "loop, 90%",
		"files, 70%", "files, 90%")
	r.drawFCT(c, "FCT by demand", axis, true)
	for d, name := range []string{"pages", "loop", "files"} {
		worst := 0.0 // the better one of SED and HLB, over the best of the other rivals
		for l := range loads {
			at := d*len(loads) + l
			best := min(c.mean(at, "SED"), c.mean(at, "HLB"))
			worst = max(worst, best/c.best(at, "SED", "HLB").Mean().Value)
			load := fmt.Sprintf(", %.0f%%", 100*loads[l])
			switch name {
			case "loop":
				r.notWorse("LSQ / best of SED and HLB, loop"+load, c.mean(at, "LSQ")/best,
					"similar performance, says the text")
				r.because("the text does not state the rates. LSQ, which ignores the capacities, is " +
					"5%% worse at 50%%, and less than 1%% at 30%%")
			case "files":
				r.atLeast("LSQ / ECMP, files"+load, "1", c.mean(at, "LSQ")/c.mean(at, "ECMP"),
					stated, "not better than ECMP, says the text")
				r.because("the simulated files need only the disk, and LSQ shares out the disks. " +
					"LSQ takes 2%% less time even at 5%%. Conjecture: the paper's files waited for " +
					"something that all servers share")
			}
		}
		r.atMost("largest SED or HLB / best of the others at both loads, "+name, "1", worst, stated,
			"SED and HLB have the best performance, says the text")
	}
	r.remark("%s", syntheticDemands)
	r.remark("The loop is exponential with a mean of 0.2 s, as in the paper. The files have the " +
		"paper's sizes, and a server reads 125 MB/s, which is ours. The loads are relative to " +
		"the processors, or for files to the disks.")
	return nil
}

// hlb23 slows the processors of the powerful servers down to half of their speed at 30 s, as
// additional work on them would.
func hlb23(ctx context.Context, r *run) error {
	const change, speed = 30, 0.5
	const settled, last = 15, 30 // seconds; the weights are compared before change and at the end
	seconds := pick(r, 150.0, 300.0)
	rivals, err := rivals(realRivals...)
	if err != nil {
		return err
	}
	var weights groupWeights
	c, err := r.onTestbed(ctx, rivals, 1, func(_, i int) (*sim.Config, error) {
		// The load is relative to the capacity from 30 s on: 8 + 12/2 of 20 processors.
		c, err := hlbTestbed(rivals[i], wikiDemand, 0.85*14/20, seconds)
		if err != nil {
			return nil, err
		}
		c.Warmup, c.Every = change/seconds, 5
		c.Events = []sim.Event{
			{At: change, Kind: sim.SetSpeed, Speed: speed, Servers: []int32{4, 5, 6}},
		}
		if rivals[i].name == "HLB" {
			c.SampleInterval, c.Sample = groupWeightsInterval, weights.look
		}
		return c, nil
	})
	if err != nil {
		return err
	}
	over := chart.Chart{
		Title: "Mean FCT over time",
		X:     chart.Axis{Label: "time, s"},
		Y:     chart.Axis{Label: meanFCT, Log: true},
	}
	for i, rival := range rivals {
		series := chart.Series{Name: rival.name}
		for j, interval := range c.results[0][i].Intervals() {
			series.Points = append(series.Points,
				chart.Point{X: 5 * (float64(j) + 0.5), Y: interval.Mean().Value})
		}
		over.Series = append(over.Series, series)
	}
	r.draw(over)
	r.draw(chart.Chart{
		Title:  "Weights that HLB gives the powerful servers over the others",
		X:      chart.Axis{Label: "time, s"},
		Y:      chart.Axis{Label: "ratio of weights"},
		Series: []chart.Series{{Name: "HLB", Points: weights.points()}},
	})
	before, after := weights.mean(settled, change), weights.mean(seconds-last, seconds)
	r.fastest(c, 0, "HLB", ", flows from 30 s on", "better than other algorithms, says the text")
	r.because("afterwards both groups have the same capacity, and LSQ takes all servers for equal. If " +
		"the additional work leaves three quarters of the speed, HLB takes 0.95 of LSQ's time, and " +
		"1.03 of SED's")
	r.smaller("ratio of weights in the last 30 s", "from 15 to 30 s", after, before,
		"HLB adapts its weights, says the text")
	r.smaller("distance of the ratio of weights from 1 in the last 30 s", "from 15 to 30 s",
		math.Abs(after-1), math.Abs(before-1), "the speeds become similar, says the text")
	r.remark("The ratio of weights is %.3f from 15 to 30 s, and %.3f in the last 30 s. By the printed "+
		"formula, it is at most e^(1/4) = 1.28.", before, after)
	r.remark("%s", syntheticDemands)
	r.remark(
		"The text does not state the additional work. Here it leaves half of the speed of the " +
			"three servers with four processors, which leaves them with the capacity of the " +
			"others.")
	return nil
}

// groupWeightsInterval is the time in seconds between two samples of the weights.
const groupWeightsInterval = 2.5

// groupWeights collects ratios over time: the mean weight that HLB gives the second group of
// servers, divided by that of the first.
type groupWeights struct {
	mu          sync.Mutex // several runs are sampled at the same time
	sums, count []float64  // sum and number of the ratios of each sample
}

// look adds the ratio of the mean weights in one run at the time now.
func (g *groupWeights) look(_ int, now float64, world sim.World) {
	var sums, servers [2]float64
	weighings(world, func(s int32, hlb weighing) {
		sums[world.Server(s).Group] += hlb.Weight(s)
		servers[world.Server(s).Group]++
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	at := int(math.Round(now/groupWeightsInterval)) - 1
	for len(g.sums) <= at {
		g.sums, g.count = append(g.sums, 0), append(g.count, 0)
	}
	g.sums[at] += (sums[1] / servers[1]) / (sums[0] / servers[0])
	g.count[at]++
}

// points returns the mean ratio of each sample.
func (g *groupWeights) points() []chart.Point {
	var points []chart.Point
	for i := range g.sums {
		points = append(points,
			chart.Point{X: float64(i+1) * groupWeightsInterval, Y: g.sums[i] / g.count[i]})
	}
	return points
}

// mean returns the mean ratio of the samples after the time from, up to the time to.
func (g *groupWeights) mean(from, to float64) float64 {
	sum, n := 0.0, 0.0
	for _, p := range g.points() {
		if p.X > from && p.X <= to {
			sum, n = sum+p.Y, n+1
		}
	}
	return sum / n
}
