// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/model"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// modelCurves are the policies of figures 8 and 9 of 6LB.
var modelCurves = []struct {
	name      string
	threshold int // 0 stands for single choice
}{{"SC", 0}, {"SR2", 2}, {"SR4", 4}, {"SR8", 8}}

// steady returns the steady state of servers with one core: with SRc, or with single choice if the
// threshold is 0.
func steady(load float64, threshold int) (*model.Steady, error) {
	if threshold == 0 {
		return model.SingleChoice(load, 1)
	}
	return model.SRc(load, 1, threshold)
}

// loadCurves draws a value of each policy against the load. top is the end of the vertical axis.
func loadCurves(
	title, label string, top float64, value func(*model.Steady) (float64, error),
) (chart.Chart, error) {
	c := chart.Chart{
		Title: title,
		X:     chart.Axis{Label: "load λ", Min: 0, Max: 1},
		Y:     chart.Axis{Label: label, Max: top},
	}
	for i, curve := range modelCurves {
		series := chart.Series{Name: curve.name, Style: chart.Line}
		if i == 0 {
			series.Style = chart.Dashed
		}
		for step := 1; step < 200; step++ {
			load := float64(step) / 200
			s, err := steady(load, curve.threshold)
			if err != nil {
				return c, err
			}
			y, err := value(s)
			if err != nil {
				return c, err
			}
			series.Points = append(series.Points, chart.Point{X: load, Y: y})
		}
		c.Series = append(c.Series, series)
	}
	return c, nil
}

// always adapts a function that has no error.
func always(value func(*model.Steady) float64) func(*model.Steady) (float64, error) {
	return func(s *model.Steady) (float64, error) { return value(s), nil }
}

// figure8a draws the mean response times of the model, with marks of simulations.
func figure8a(ctx context.Context, r *run) error {
	c, err := loadCurves("Expected response time", "E[T], mean service times", 10, always((*model.Steady).MeanResponse))
	if err != nil {
		return err
	}
	deviation, err := r.addManyServers(ctx, &c)
	if err != nil {
		return err
	}
	const stated = 0.983 // the load from which SR8 is better than SR4
	s, err := steady(stated, 8)
	if err != nil {
		return err
	}
	c.Series = append(c.Series, printed("SR8", chart.Point{X: stated, Y: s.MeanResponse()}))
	r.draw(c)
	r.remark("Marks: simulations of %d servers. They differ from the model by at most %.2f%%. The cross is at "+
		"the load from which SR8 is better than SR4, by the paper.", manyServers, 100*deviation)
	crossing, err := crossing(4, 8)
	if err != nil {
		return err
	}
	r.about("load from which SR8 is better than SR4", "0.983", crossing, digits, "")
	return nil
}

// manyServers is a number of servers that is nearly infinite, as the model assumes.
const manyServers = 10_000

// settlingTime returns the duration of a simulation whose servers start empty, and whose second
// half is measured. In the first half, the mean number of flows by equation (1) comes within 0.1%
// of the steady state. The duration is at least shortest.
func settlingTime(
	ctx context.Context, load float64, threshold int, shortest float64,
) (float64, error) {
	s, err := steady(load, threshold)
	if err != nil {
		return 0, err
	}
	t, err := model.NewTransient(load, 1, threshold, 0)
	if err != nil {
		return 0, err
	}
	const step = 5
	now := 0.0
	for t.MeanFlows() < 0.999*s.MeanFlows() {
		if err := t.Advance(ctx, step); err != nil {
			return 0, err
		}
		now += step
	}
	return max(shortest, 2*now), nil
}

// manyServersConfig returns the configuration of a simulation of manyServers servers. They have one
// processor, serve first come, first served, and start empty. Only the second half of the duration
// is measured.
func manyServersConfig(load float64, threshold int, duration float64) (*sim.Config, error) {
	spec := &placement.SR{Hunt: placement.Hunt{Candidates: 2, Random: true}, Threshold: threshold}
	method, policy, err := spec.Build()
	if err != nil {
		return nil, err
	}
	c := &sim.Config{
		Balancers: []sim.Share{{Weight: 1}},
		Jobs:      []sim.Job{{Share: 1, Stages: []sim.Stage{{Queue: sim.CPU, Work: sim.Exponential(1)}}}},
		Placement: method, Policy: policy, Duration: duration, Warmup: 0.5,
	}
	for i := range manyServers {
		c.Servers = append(c.Servers, sim.Server{Name: fmt.Sprint(i), CPUs: 1, Speed: 1, IOSpeed: 1, Backlog: -1})
	}
	c.Arrivals = sim.Poisson{Rate: c.Rate(load)}
	return c, nil
}

// addManyServers simulates many servers, marks the results in the chart, and returns their largest
// relative deviation from the model.
func (r *run) addManyServers(ctx context.Context, c *chart.Chart) (deviation float64, err error) {
	loads := pick(r, []float64{0.7, 0.88}, []float64{0.5, 0.7, 0.8, 0.88, 0.95})
	curves := pick(r, modelCurves[2:3], modelCurves[1:])
	var configs []*sim.Config
	for _, curve := range curves {
		for _, load := range loads {
			duration, err := settlingTime(ctx, load, curve.threshold, pick(r, 80.0, 200.0))
			if err != nil {
				return 0, err
			}
			config, err := manyServersConfig(load, curve.threshold, duration)
			if err != nil {
				return 0, err
			}
			configs = append(configs, config)
		}
	}
	results, err := r.simulate(ctx, configs, 1)
	if err != nil {
		return 0, err
	}
	for i, curve := range curves {
		series := chart.Series{Name: curve.name + ", simulated", Style: chart.Marks, Like: curve.name}
		for j, load := range loads {
			s, err := steady(load, curve.threshold)
			if err != nil {
				return 0, err
			}
			mean := results[i*len(loads)+j].Mean()
			series.Points = append(series.Points, estimated(load, mean))
			deviation = max(deviation, math.Abs(mean.Value/s.MeanResponse()-1))
		}
		c.Series = append(c.Series, series)
	}
	return deviation, nil
}

// crossing finds, by bisection, the load above which SRc has a longer mean response time with the
// threshold low than with the threshold high.
func crossing(low, high int) (float64, error) {
	from, to := 0.5, 1-1e-6
	for to-from > 1e-9 {
		middle := (from + to) / 2
		a, err := steady(middle, low)
		if err != nil {
			return 0, err
		}
		b, err := steady(middle, high)
		if err != nil {
			return 0, err
		}
		if a.MeanResponse() < b.MeanResponse() {
			from = middle
		} else {
			to = middle
		}
	}
	return to, nil
}

// figure8b draws Jain's index of the servers' numbers of flows, and checks that no SRc has a lower
// one than SC.
func figure8b(_ context.Context, r *run) error {
	c, err := loadCurves("Fairness index", "Jain's index of flows per server", 1, always((*model.Steady).Fairness))
	if err != nil {
		return err
	}
	r.draw(c)
	least, _ := overSingleChoice(c)
	r.atLeast("smallest SRc / SC at any load", "1", least, stated,
		"better than single choice, says the text")
	return nil
}

// figure8c draws the 90th percentiles of response times, and checks that no SRc has a higher one
// than SC.
func figure8c(_ context.Context, r *run) error {
	c, err := loadCurves("90th percentile of response times", "π90, mean service times", 25,
		func(s *model.Steady) (float64, error) { return s.Percentile(90) })
	if err != nil {
		return err
	}
	r.draw(c)
	_, most := overSingleChoice(c)
	r.atMost("largest SRc / SC at any load", "1", most, stated,
		"lower than with single choice, says the text")
	return nil
}

// overSingleChoice returns the smallest and the largest ratio of SRc to single choice at the same
// load.
func overSingleChoice(c chart.Chart) (least, most float64) {
	least, most = math.Inf(1), math.Inf(-1)
	for i, single := range c.Series[0].Points {
		for _, series := range c.Series[1:] {
			ratio := series.Points[i].Y / single.Y
			least, most = min(least, ratio), max(most, ratio)
		}
	}
	return least, most
}

// figure8d draws the mean response times of the model, if passing a flow on takes as long as a mean
// service.
func figure8d(_ context.Context, r *run) error {
	c, err := loadCurves("Expected response time with delay δ = 1", "E[T] + δ·s_c, mean service times", 10,
		always(func(s *model.Steady) float64 { return s.MeanResponseWithDelay(1) }))
	if err != nil {
		return err
	}
	r.draw(c)
	r.remark(
		"Theorem 1 of the paper, which is proved, states that SRc is never worse than SC. So a " +
			"test of package model checks it, and no comparison is made here.")
	return nil
}

// figure8e draws the distribution of response times of each policy at the load 0.88, and compares
// the standard deviations.
func figure8e(_ context.Context, r *run) error {
	c := chart.Chart{
		Title: "Distribution of response times, λ = 0.88",
		X:     chart.Axis{Label: "response time, mean service times", Max: 30},
		Y:     chart.Axis{Label: "share of flows", Max: 1},
	}
	var deviations []float64
	for i, curve := range modelCurves {
		s, err := steady(0.88, curve.threshold)
		if err != nil {
			return err
		}
		series := chart.Series{Name: curve.name}
		if i == 0 {
			series.Style = chart.Dashed
		}
		for t := 0.0; t <= 30; t += 0.1 {
			series.Points = append(series.Points, chart.Point{X: t, Y: s.CDF(t)})
		}
		c.Series = append(c.Series, series)
		deviations = append(deviations, deviation(s))
	}
	r.draw(c)
	r.smaller("largest deviation with SRc", "SC", slices.Max(deviations[1:]), deviations[0], "")
	return nil
}

// deviation returns the standard deviation of the response times on servers with one core, first
// come, first served. The response time of a flow that is the k-th on its server is the sum of k
// exponential times of mean 1: its mean is k, and the mean of its square is k(k+1).
func deviation(s *model.Steady) float64 {
	mean, square := 0.0, 0.0
	for k := 1; s.AtLeast(k) > 1e-15; k++ {
		p := s.Share(k) / s.Load // section V-F
		mean += p * float64(k)
		square += p * float64(k*(k+1))
	}
	return math.Sqrt(square - mean*mean)
}

// figure8f draws N'/N of equation (11): the servers that SR4 needs to keep a limit of the 90th
// percentile, divided by those of single choice. Servers have one core.
func figure8f(_ context.Context, r *run) error {
	compare := func(limit float64) (model.Saving, error) {
		return model.CompareServers(90, limit, 1, 4)
	}
	c := chart.Chart{
		Title: "Servers that SR4 needs, relative to single choice (SC)",
		X:     chart.Axis{Label: "limit μ0 of the 90th percentile, mean service times", Min: 2.3, Max: 20},
		Y:     chart.Axis{Label: "N'/N", Max: 1},
	}
	series := chart.Series{Name: "SR4"}
	for limit := 2.4; limit <= 20; limit += 0.1 {
		saving, err := compare(limit)
		if err != nil {
			return err
		}
		series.Points = append(series.Points, chart.Point{X: limit, Y: saving.Ratio})
	}
	c.Series = []chart.Series{series, printed("SR4", chart.Point{X: 6, Y: 0.71})}
	r.draw(c)
	saving, err := compare(6)
	if err != nil {
		return err
	}
	r.about("N' for N = 100 and μ0 = 6", "71", 100*saving.Ratio, digits, "")
	return nil
}

// figure9 draws the probability that a server passes a flow on to one with more flows.
func figure9(_ context.Context, r *run) error {
	c, err := loadCurves("Wrongful rejections", "probability p_w", 0.2, always((*model.Steady).WrongfullyRejected))
	if err != nil {
		return err
	}
	c.Series = c.Series[1:] // single choice has no second server
	c.Series = append(c.Series, printed("SR4", chart.Point{X: 0.9, Y: 0.045}))
	r.draw(c)
	s, err := steady(0.9, 4)
	if err != nil {
		return err
	}
	r.atMost("SR4 at λ = 0.9", "0.045", s.WrongfullyRejected(), stated, "")
	return nil
}
