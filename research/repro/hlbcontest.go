// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// rival is a placement that HLB compares, with the paper's name for it.
type rival struct {
	name string
	spec placement.Spec
}

// realRivals are the placements of section V-C that do not know the work of flows. everyRival also
// has the Oracle, which knows it.
var (
	realRivals = []string{"ECMP", "WCMP", "AWCMP", "LSQ", "GSQ2", "SED", "HLB"}
	everyRival = append(slices.Clone(realRivals), "Oracle")
)

// nameOfPlacement returns the name that package placement has for a placement of the paper.
func nameOfPlacement(paper string) string {
	return strings.ToLower(strings.Replace(paper, "LSQ", "least-queue", 1))
}

// rivals returns the placements with the given names. They have their default parameters, except
// that HLB has algorithm 1 as printed.
func rivals(names ...string) ([]rival, error) {
	var list []rival
	for _, name := range names {
		spec, err := placement.Named(nameOfPlacement(name))
		if err != nil {
			return nil, err
		}
		if hlb, ok := spec.(*placement.HLB); ok {
			hlb.Sampling = placement.SamplingAsPrinted
		}
		list = append(list, rival{name, spec})
	}
	return list, nil
}

// countedFromSYN is the end of the names of rivals that count flows from the SYN, instead of
// established flows.
const countedFromSYN = ", from the SYN"

// fromSYN returns rivals that count flows from the SYN. The names must be LSQ, SED or HLB.
func fromSYN(names ...string) ([]rival, error) {
	list, err := rivals(names...)
	if err != nil {
		return nil, err
	}
	for i := range list {
		switch spec := list[i].spec.(type) {
		case *placement.LeastQueue:
			spec.Count = placement.CountPlaced
		case *placement.SED:
			spec.Count = placement.CountPlaced
		case *placement.HLB:
			spec.Count = placement.CountPlaced
		default:
			return nil, fmt.Errorf("%s does not count flows by itself", list[i].name)
		}
		list[i].name += countedFromSYN
	}
	return list, nil
}

// hlbWith returns HLB with other parameters of its weights.
func hlbWith(name string, change func(*placement.Weights)) (rival, error) {
	list, err := rivals("HLB")
	if err != nil {
		return rival{}, err
	}
	change(&list[0].spec.(*placement.HLB).Weights)
	return rival{name, list[0].spec}, nil
}

// setting is a cluster, a load and other conditions of a simulation of rivals.
type setting struct {
	cluster hlbCluster
	load    float64
	rivals  []rival
	// watch, if not nil, adds a sampler to the configuration of a rival.
	watch func(c *sim.Config, rival int)
}

// settings returns settings with the same rivals and load on several clusters.
func settings(clusters []hlbCluster, load float64, rivals []rival) []setting {
	var list []setting
	for _, cluster := range clusters {
		list = append(list, setting{cluster: cluster, load: load, rivals: rivals})
	}
	return list
}

// contest has the results of several settings. All settings have rivals of the same names.
type contest struct {
	rivals  []rival
	results [][]*sim.Result // by setting and rival
}

// ifAtEnd begins a reason that docs/research/reproduction.md explains: HLB is better with these
// choices, which are not those of the paper's text.
const ifAtEnd = "if HLB takes one duration at the end of a flow instead of those of algorithm 1, " +
	"counts flows from the SYN, and takes an unknown server for an average one"

// hlbPaperRuns is the paper's smallest number of runs (section VI). Figure 10 has fewer (footnote
// 10).
const hlbPaperRuns, hlb10PaperRuns = 10, 5

// hlbRuns returns the number of runs, which is the paper's minimum of 10 (section VI) unless the
// figure is quick.
func (r *run) hlbRuns() int { return pick(r, 4, hlbPaperRuns) }

// compete simulates all rivals in all settings with the given number of runs. All settings must
// have rivals of the same names.
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

// of returns the result of a rival in a setting.
func (c *contest) of(setting int, name string) *sim.Result {
	return c.results[setting][slices.IndexFunc(c.rivals, func(r rival) bool { return r.name == name })]
}

// mean returns the mean flow completion time (FCT) of a rival in a setting.
func (c *contest) mean(setting int, name string) float64 { return c.of(setting, name).Mean().Value }

// best returns the result with the shortest mean FCT in a setting, without the Oracle, the rivals
// that count flows from the SYN, and the given rivals.
func (c *contest) best(setting int, without ...string) *sim.Result {
	var best *sim.Result
	for i, rival := range c.rivals {
		if rival.name == "Oracle" || strings.HasSuffix(rival.name, countedFromSYN) ||
			slices.Contains(without, rival.name) {
			continue
		}
		if result := c.results[setting][i]; best == nil || result.Mean().Value < best.Mean().Value {
			best = result
		}
	}
	return best
}

// fastest checks that the mean FCT of one rival in a setting is shorter than that of the best other
// rival, which contest.best finds, without the given rivals.
func (r *run) fastest(c *contest, setting int, one, where, note string, without ...string) {
	best := c.best(setting, append(without, one)...)
	r.smaller(one, "best of the others"+where, c.mean(setting, one), best.Mean().Value, note)
}

// shorter checks that the mean FCT of one rival in a setting is shorter than that of another, as
// the paper states.
func (r *run) shorter(c *contest, setting int, one, other, where string) {
	r.smaller(one, other+where, c.mean(setting, one), c.mean(setting, other), "")
}

// chart draws a value of all results, with one series for each rival, and one point for each
// setting.
func (c *contest) chart(
	title string, x places, y chart.Axis, value func(*sim.Result) sim.Estimate,
) chart.Chart {
	style := chart.Marked
	if len(x.axis.Categories) > 0 {
		style = chart.Bars
	}
	drawn := chart.Chart{Title: title, X: x.axis, Y: y}
	for i, rival := range c.rivals {
		series := chart.Series{Name: rival.name, Style: style}
		if all, ok := strings.CutSuffix(rival.name, "2"); ok {
			series.Like = all // HLB2 has the colour of HLB, if the chart has HLB
		}
		if established, ok := strings.CutSuffix(rival.name, countedFromSYN); ok {
			series.Like = established
			if style == chart.Marked {
				series.Style = chart.Dashed // bars need no other style: package chart makes them hollow
			}
		}
		for j, at := range x.at {
			series.Points = append(series.Points, estimated(at, value(c.results[j][i])))
		}
		drawn.Series = append(drawn.Series, series)
	}
	if style == chart.Bars && y.Max == 0 && !y.Log {
		drawn.Y.Max = cutOff(drawn.Series)
	}
	return drawn
}

// cutOff returns the value at which bars are cut off, or 0 if none are. Next to very high bars, the
// differences between the others would be invisible. The value is twice the upper quartile, if that
// is less than three quarters of the highest bar.
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

// meanFCT is the label of an axis.
const meanFCT = "mean flow completion time (FCT), s"

// drawFCT draws the mean and the 90th percentile of the FCT. The axes may be logarithmic.
func (r *run) drawFCT(c *contest, title string, x places, log bool) {
	mean, tail := c.chartsOfFCT(title, x, log)
	r.draw(mean)
	r.draw(tail)
}

// chartsOfFCT returns the charts of drawFCT.
func (c *contest) chartsOfFCT(title string, x places, log bool) (mean, tail chart.Chart) {
	mean = c.chart("Mean "+title, x, chart.Axis{Label: meanFCT, Log: log},
		(*sim.Result).Mean)
	tail = c.chart("90th percentile of "+title, x,
		chart.Axis{Label: "90th percentile of the flow completion time (FCT), s", Log: log}, p90)
	return mean, tail
}

func p90(result *sim.Result) sim.Estimate { return result.Quantile(0.9) }
