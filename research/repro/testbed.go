// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// testbed is the testbed of SRLB (section IV) and 6LB (section VI-A): virtual machines with two
// processors and Apache, which has 32 workers and a backlog of 128. Apache refuses connections
// beyond that. The load ρ here is relative to the processors. In the papers it is relative to the
// highest rate without refusals, which they do not state.
type testbed struct {
	servers   int
	balancers int
	queries   uint64
	buckets   int
	job       sim.Distribution
	// random tells that the candidates are random servers. Otherwise the table has them.
	random bool
	// experiment is part of the servers' names, and so determines the table.
	experiment int
}

// The papers' testbeds. SRLB chooses candidates at random.
var (
	srlbTestbed  = testbed{servers: 12, balancers: 1, queries: 20_000, random: true, job: sim.Exponential(0.1)}
	sixLBTestbed = testbed{servers: 48, balancers: 2, queries: 80_000, buckets: 65536, job: sim.Exponential(0.19)}
)

func (t testbed) hunt() placement.Hunt {
	return placement.Hunt{Candidates: 2, Buckets: t.buckets, Random: t.random}
}

// contender is a policy that the papers compare on a testbed.
type contender struct {
	name string
	spec func(t testbed) placement.Spec
}

// single returns single choice: if candidates are random, a server by the hash of the flow, and
// otherwise the server in the table.
func single(t testbed) placement.Spec {
	if t.random {
		return &placement.ECMP{}
	}
	return &placement.Hash{Candidates: 1, Buckets: t.buckets}
}

// sr returns SRc with c = threshold.
func sr(threshold int) func(testbed) placement.Spec {
	return func(t testbed) placement.Spec { return &placement.SR{Hunt: t.hunt(), Threshold: threshold} }
}

var (
	singleChoice = contender{"SC", single}
	sr4          = contender{"SR4", sr(4)}
	srDynamic    = contender{"SRdyn", func(t testbed) placement.Spec {
		return &placement.SRDyn{Hunt: t.hunt(), Window: 50, Epsilon: 0.1, Initial: 1}
	}}
	roundRobin = contender{"round-robin", func(testbed) placement.Spec { return &placement.RoundRobin{} }}
	// feedback polls every 200 ms, as section VI-B7 of 6LB.
	feedback = contender{"feedback", func(testbed) placement.Spec {
		return feedbackEvery(200 * time.Millisecond)
	}}
	// hunters are the contenders of most figures. Functions rely on their order.
	hunters = []contender{singleChoice, sr4, {"SR8", sr(8)}, {"SR16", sr(16)}, srDynamic}
)

// feedbackEvery returns round-robin by weights from polls of the servers, as in 6LB.
func feedbackEvery(interval time.Duration) placement.Spec {
	return &placement.WeightedRoundRobin{
		Polled: placement.Polled{Interval: interval}, Formula: placement.Formula6LB,
	}
}

// config returns the configuration of a batch of queries to empty servers, at a rate in queries per
// second. All queries are measured.
func (t testbed) config(c contender, rate float64) (*sim.Config, error) {
	method, policy, err := c.spec(t).Build()
	if err != nil {
		return nil, err
	}
	config := &sim.Config{
		Balancers: slices.Repeat([]sim.Share{{Weight: 1}}, t.balancers),
		Jobs:      []sim.Job{{Share: 1, Stages: []sim.Stage{{Queue: sim.CPU, Work: t.job}}}},
		Arrivals:  sim.Poisson{Rate: rate},
		Placement: method, Policy: policy, Connections: t.queries,
	}
	for i := range t.servers {
		config.Servers = append(config.Servers, sim.Server{
			Name: fmt.Sprintf("server-%d/%d", i, t.experiment), CPUs: 2, Speed: 1, IOSpeed: 1,
			Discipline: sim.ProcessorSharing, Workers: 32, Backlog: 128,
		})
	}
	return config, nil
}

// rate returns the number of arrivals per second that load the processors with rho.
func (t testbed) rate(rho float64) float64 { return rho * float64(2*t.servers) / t.job.Mean() }

// batches collects configurations, one for each batch, and the errors of making them.
type batches struct {
	configs []*sim.Config
	err     error
}

// add adds the configuration of a batch. If it cannot be made, simulateBatches returns the error.
func (b *batches) add(t testbed, c contender, rate float64) {
	config, err := t.config(c, rate)
	b.configs = append(b.configs, config)
	b.err = errors.Join(b.err, err)
}

// simulateBatches simulates all batches, and returns their results in the order in which they were
// added. It returns the errors of making them, if there are any.
func (r *run) simulateBatches(ctx context.Context, b *batches, runs int) ([]*sim.Result, error) {
	if b.err != nil {
		return nil, b.err
	}
	return r.simulate(ctx, b.configs, runs)
}

// sweep simulates contenders at several loads. It returns the results by contender and load.
func (r *run) sweep(
	ctx context.Context, t testbed, contenders []contender, loads []float64, runs int,
) ([][]*sim.Result, error) {
	var b batches
	for _, c := range contenders {
		for _, rho := range loads {
			b.add(t, c, t.rate(rho))
		}
	}
	results, err := r.simulateBatches(ctx, &b, runs)
	if err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(results, len(loads))), nil
}

// meanChart draws the mean response times of a sweep.
func meanChart(
	title string, contenders []contender, loads []float64, results [][]*sim.Result,
) chart.Chart {
	c := chart.Chart{
		Title: title,
		X:     chart.Axis{Label: "load of the processors, ρ", Max: 1},
		Y:     chart.Axis{Label: "mean response time, s"},
	}
	for i, contender := range contenders {
		series := chart.Series{Name: contender.name, Style: chart.Marked}
		for j, rho := range loads {
			series.Points = append(series.Points, estimated(rho, results[i][j].Mean()))
		}
		c.Series = append(c.Series, series)
	}
	return c
}

// compareAtHighLoad checks a statement of the text about response times at high load: with single
// choice, which is the first result, their mean and their deviation are the largest.
func (r *run) compareAtHighLoad(results []*sim.Result, rho float64) {
	mean, deviation := 0.0, 0.0
	for _, result := range results[1:] {
		mean, deviation = max(mean, result.Response.Mean()), max(deviation, result.Response.Deviation())
	}
	at := fmt.Sprintf("SC at ρ = %v", rho)
	r.smaller("largest mean of the others", at, mean, results[0].Response.Mean(), "")
	r.smaller("largest deviation of the others", at, deviation, results[0].Response.Deviation(), "")
}

// distributions draws the distributions of the contenders' response times at one load, up to the
// 98th percentile of the first contender. It returns the results.
func (r *run) distributions(
	ctx context.Context, t testbed, contenders []contender, rho float64, runs int,
) ([]*sim.Result, error) {
	results, err := r.sweep(ctx, t, contenders, []float64{rho}, runs)
	if err != nil {
		return nil, err
	}
	c := chart.Chart{
		Title: fmt.Sprintf("Distribution of response times, ρ = %v", rho),
		X:     chart.Axis{Label: "response time, s"},
		Y:     chart.Axis{Label: "share of queries", Max: 1},
	}
	longest := results[0][0].Quantile(0.98).Value
	var flat []*sim.Result
	for i, contender := range contenders {
		style := chart.Line
		if i == 0 {
			style = chart.Dashed
		}
		c.Series = append(c.Series, cdf(contender.name, style, results[i][0], longest))
		flat = append(flat, results[i][0])
	}
	r.draw(c)
	return flat, nil
}

// loadsOverTime draws, over one batch, the mean number of open flows of a server, and Jain's index
// of these numbers. It smooths both as the papers do, by an exponential moving average with a time
// constant of one second. The papers draw busy workers, which are as many as open flows while a
// server has free workers. The first two contenders must be single choice and SR4, which the texts
// compare.
func (r *run) loadsOverTime(ctx context.Context, t testbed, contenders []contender, rho float64) error {
	const interval = 0.5
	load := chart.Chart{
		Title: fmt.Sprintf("Open flows of a server, ρ = %v", rho),
		X:     chart.Axis{Label: "time, s"}, Y: chart.Axis{Label: "mean over servers"},
	}
	fairness := chart.Chart{
		Title: fmt.Sprintf("Fairness of the servers' loads, ρ = %v", rho),
		X:     chart.Axis{Label: "time, s"}, Y: chart.Axis{Label: "Jain's index", Max: 1},
	}
	var b batches
	for _, c := range contenders {
		b.add(t, c, t.rate(rho))
	}
	for _, config := range b.configs {
		config.Every = interval
		// The arrivals end at a time, and not after a number of queries: the time that t.queries
		// take in the mean. The papers do not show the load that remains after the last arrival.
		config.Connections, config.Duration = 0, float64(t.queries)/t.rate(rho)
	}
	results, err := r.simulateBatches(ctx, &b, 1)
	if err != nil {
		return err
	}
	means := make([][2]float64, len(contenders))
	for i, c := range contenders {
		series := [2]chart.Series{{Name: c.name}, {Name: c.name}}
		var smooth [2]float64
		all := results[i].Runs[0].Series
		for j := range all {
			loads := [2]float64{all[j].Open, all[j].InstantFairness}
			if j == 0 {
				smooth = loads
			}
			for k := range smooth {
				means[i][k] += loads[k] / float64(len(all))
				smooth[k] += (1 - math.Exp(-interval)) * (loads[k] - smooth[k])
				series[k].Points = append(series[k].Points, chart.Point{X: float64(j+1) * interval, Y: smooth[k]})
			}
		}
		load.Series = append(load.Series, series[0])
		fairness.Series = append(fairness.Series, series[1])
	}
	r.draw(load)
	r.draw(fairness)
	r.smaller("open flows over time with SR4", "SC", means[1][0], means[0][0], "")
	r.atLeast("fairness over time with SR4 / SC", "1", means[1][1]/means[0][1], stated,
		"closer to 1 than with single choice, says the text")
	return nil
}

// ratio returns the mean response time of result a, divided by that of b.
func ratio(a, b *sim.Result) float64 { return a.Mean().Value / b.Mean().Value }
