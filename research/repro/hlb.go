// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/model"
)

// hlbFigures are the figures of "HLB: Toward Load-Aware Load Balancing" whose results come from
// simulation or computation, and figures 20, 21 and 23, for which a simulation replaces the
// testbed.
var hlbFigures = []Figure{
	{"hlb-2", "Two servers of unequal speed, four rules, three sorts of knowledge", "HLB, section III-A", hlb2},
	{"hlb-10", "Flow completion times by load", "HLB, section VI-A3", hlb10},
	{"hlb-12", "Servers of unequal capacity", "HLB, section VI-B2", hlb12},
	{"hlb-13", "Power of two choices", "HLB, section VI-C1", hlb13},
	{"hlb-14", "Weights and queues by number of balancers", "HLB, section VI-C2", hlb14},
	{"hlb-15", "What balancers believe and what is", "HLB, section VI-C2", hlb15},
	{"hlb-17", "Interval between updates of the weights", "HLB, section VI-D1", hlb17},
	{"hlb-18", "Distributions of the flows' work", "HLB, section VI-D1", hlb18},
	{"hlb-19", "Size of the flow table", "HLB, section VI-D2", hlb19},
	{"hlb-20", "Round trips between clients and servers", "HLB, section VI-D3", hlb20},
	{"hlb-21", "Sorts of demand", "HLB, section VI-E1", hlb21},
	{"hlb-22", "Applications of three stages", "HLB, section VI-E1", hlb22},
	{"hlb-23", "Servers that become slower", "HLB, section VI-E2", hlb23},
}

// hlb2Room is Q, the number of flows for which a server has room. The paper does not state it. With
// a larger Q, all durations are longer, and their order is the same.
const hlb2Room = 16

// hlb2 computes the durations of flows on two servers in two ways: by the paper's equation, and by
// the Markov chain of both queues. It draws both, and checks the paper's statements by the chain.
func hlb2(ctx context.Context, r *run) error {
	scenarios := []struct {
		name     string
		observed float64
		weights  [2]float64
	}{
		{"all observed", 1, [2]float64{2, 1}},
		{"half observed", 0.5, [2]float64{2, 1}},
		{"wrong weights", 1, [2]float64{1, 2}},
	}
	const equation, chain = 0, 1
	var durations [2][3][4]float64 // by method (equation or chain), scenario and rule
	charts := []chart.Chart{
		{Title: "Queues apart, by the paper's equation"},
		{Title: "Markov chain of both queues"},
	}
	for method, solve := range []func(model.TwoServers) (model.TwoServersResult, error){
		model.TwoServers.SolveApart,
		func(s model.TwoServers) (model.TwoServersResult, error) { return s.Solve(ctx) },
	} {
		c := &charts[method]
		c.X = chart.Axis{Label: "knowledge of the balancer"}
		c.Y = chart.Axis{Label: "weighted duration of a flow"}
		for _, rule := range model.Rules {
			series := chart.Series{Name: rule.String(), Style: chart.Bars}
			for i, scenario := range scenarios {
				result, err := solve(model.TwoServers{
					Speeds: [2]float64{2, 1}, Weights: scenario.weights, Load: 1,
					Observed: scenario.observed, Room: hlb2Room, Rule: rule,
				})
				if err != nil {
					return err
				}
				durations[method][i][rule] = result.Duration
				series.Points = append(series.Points, chart.Point{X: float64(i), Y: result.Duration})
			}
			c.Series = append(c.Series, series)
		}
		for _, scenario := range scenarios {
			c.X.Categories = append(c.X.Categories, scenario.name)
		}
		r.draw(*c)
	}
	for _, statement := range hlb2Statements(durations[chain]) {
		r.smaller(statement.small, statement.large, statement.a, statement.b, "")
		r.because("the statement holds for the equation that the paper prints, but not for the " +
			"Markov chain. Conjecture: the paper's figure follows from the equation")
	}
	byEquation := hlb2Statements(durations[equation])
	hold := 0
	for _, statement := range byEquation {
		if statement.a <= statement.b {
			hold++
		}
	}
	r.remark("The paper calls the pair of queues Markovian, but its equation lets each queue "+
		"evolve by itself, with a rate that does not depend on the queue. The rows compare "+
		"the Markov chain. By the equation, %d of the %d statements hold. Conjecture: the "+
		"paper's figure follows from the equation.", hold, len(byEquation))
	r.remark("Q is %d here; the paper does not state its own.", hlb2Room)
	return nil
}

// order is a statement of the paper that one quantity is smaller than another one.
type order struct {
	small, large string
	a, b         float64 // the computed values of small and large
}

// hlb2Statements returns the statements of section III-A about durations, given the durations by
// scenario and rule. Each says that the first duration is not longer than the second.
func hlb2Statements(d [3][4]float64) []order {
	all, half, wrong := d[0], d[1], d[2]
	return []order{
		{"WCMP", "LSQ, all observed", all[model.WCMP], all[model.LSQ]},
		{"SED", "LSQ, all observed", all[model.SED], all[model.LSQ]},
		{"LSQ", "ECMP, all observed", all[model.LSQ], all[model.ECMP]},
		{"LSQ", "WCMP, half observed", half[model.LSQ], half[model.WCMP]},
		{"SED", "WCMP, half observed", half[model.SED], half[model.WCMP]},
		{"LSQ all", "half observed", all[model.LSQ], half[model.LSQ]},
		{"SED all", "half observed", all[model.SED], half[model.SED]},
		{"WCMP right", "wrong weights", all[model.WCMP], wrong[model.WCMP]},
		{"SED right", "wrong weights", all[model.SED], wrong[model.SED]},
	}
}
