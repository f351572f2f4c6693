// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/chart"
	"github.com/segue-lb/segue/internal/sim"
	"github.com/segue-lb/segue/internal/sim/placement"
)

// rival is a placement that HLB compares, by the paper's name for it.
type rival struct {
	name string
	spec placement.Spec
}

// unseenAsPrinted is what HLB takes servers for of which it has seen no flow end: algorithm 1 begins with
// buffers that are full of zeros.
const unseenAsPrinted = "zero"

// everyRival are those of section V-C.
var everyRival = []string{"ECMP", "WCMP", "AWCMP", "LSQ", "GSQ2", "SED", "HLB", "Oracle"}

// rivals are those of the names, with their default parameters, but for HLB itself.
func rivals(names ...string) ([]rival, error) {
	var list []rival
	for _, name := range names {
		spec, err := placement.Named(strings.ToLower(name))
		if err != nil {
			return nil, err
		}
		if hlb, ok := spec.(*placement.HLB); ok {
			hlb.Unseen = unseenAsPrinted
		}
		list = append(list, rival{name, spec})
	}
	return list, nil
}

// hlbWith is HLB with other parameters of its weights.
func hlbWith(name string, change func(*placement.Weights)) (rival, error) {
	list, err := rivals("HLB")
	if err != nil {
		return rival{}, err
	}
	change(&list[0].spec.(*placement.HLB).Weights)
	return rival{name, list[0].spec}, nil
}

// setting is what rivals are simulated in.
type setting struct {
	cluster hlbCluster
	load    float64
	rivals  []rival
	// watch, if set, has a rival's configuration sampled.
	watch func(c *sim.Config, rival int)
}

// settings are those of the same rivals and load on several clusters.
func settings(clusters []hlbCluster, load float64, rivals []rival) []setting {
	var list []setting
	for _, cluster := range clusters {
		list = append(list, setting{cluster: cluster, load: load, rivals: rivals})
	}
	return list
}

// contest is the results of rivals in several settings, all of which have rivals of the same names.
type contest struct {
	rivals  []rival
	results [][]*sim.Result // by setting and rival
}

// hlbRuns are as many as the paper has of simulations, at least 10 (section VI).
func (r *run) hlbRuns() int { return pick(r, 2, 10) }

// compete simulates settings, each so many times.
func (r *run) compete(ctx context.Context, settings []setting, runs int) (*contest, error) {
	c := &contest{rivals: settings[0].rivals}
	var configs []*sim.Config
	for _, s := range settings {
		for i, rival := range s.rivals {
			config, err := s.cluster.config(rival.spec, s.load)
			if err != nil {
				return nil, err
			}
			if s.watch != nil {
				s.watch(config, i)
			}
			configs = append(configs, config)
		}
	}
	results, err := r.simulate(ctx, configs, runs)
	if err != nil {
		return nil, err
	}
	c.results = slices.Collect(slices.Chunk(results, len(c.rivals)))
	return c, nil
}

// of is the result of a rival in a setting.
func (c *contest) of(setting int, name string) *sim.Result {
	return c.results[setting][slices.IndexFunc(c.rivals, func(r rival) bool { return r.name == name })]
}

// mean is the mean flow completion time (FCT) of a rival in a setting.
func (c *contest) mean(setting int, name string) float64 { return c.of(setting, name).Mean().Value }

// shorter checks that one rival's mean FCT in a setting is shorter than another's, as the paper says.
func (r *run) shorter(c *contest, setting int, one, other, where, why string) {
	r.before(one, other+where, c.mean(setting, one), c.mean(setting, other), 0, why)
}

// chart has a value of all results: a series for each rival, and in it a point for each setting.
func (r *run) chart(c *contest, title string, x places, y chart.Axis, value func(*sim.Result) sim.Estimate) chart.Chart {
	style := chart.Marked
	if len(x.axis.Categories) > 0 {
		style = chart.Bars
	}
	drawn := chart.Chart{Title: title, X: x.axis, Y: y}
	for i, rival := range c.rivals {
		series := chart.Series{Name: rival.name, Style: style}
		if all, ok := strings.CutSuffix(rival.name, "2"); ok {
			series.Like = all // of all servers instead of two of them, where that is drawn too
		}
		for j, at := range x.at {
			series.Points = append(series.Points, r.estimated(at, value(c.results[j][i])))
		}
		drawn.Series = append(drawn.Series, series)
	}
	if style == chart.Bars && y.Max == 0 && !y.Log {
		drawn.Y.Max = cutOff(drawn.Series)
	}
	return drawn
}

// cutOff is where to cut bars off, so that others beside those that are many times as high can be told
// apart: at twice the upper quartile, or 0, nowhere, if that does not save a quarter of the axis.
func cutOff(series []chart.Series) float64 {
	var values []float64
	for _, s := range series {
		for _, point := range s.Points {
			values = append(values, point.Y)
		}
	}
	slices.Sort(values)
	if top := 2 * values[len(values)*3/4]; top < 0.75*values[len(values)-1] {
		return top
	}
	return 0
}

// drawFCT draws mean and 90th percentile of the FCT, on logarithmic axes or not.
func (r *run) drawFCT(c *contest, title string, x places, log bool) {
	r.draw(r.chart(c, "Mean "+title, x, chart.Axis{Label: "mean FCT, s", Log: log}, (*sim.Result).Mean))
	r.draw(r.chart(c, "90th percentile of "+title, x, chart.Axis{Label: "p90 FCT, s", Log: log}, p90))
}

func p90(result *sim.Result) sim.Estimate { return result.Quantile(0.9) }
