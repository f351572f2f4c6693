// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"

	"github.com/segue-lb/segue/internal/chart"
	"github.com/segue-lb/segue/internal/model"
)

// hlbFigures are the figures of "HLB: Towards Load-Aware Load Balancing" whose results come from
// simulation or computation.
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
	{"hlb-22", "Applications of three stages", "HLB, section VI-E1", hlb22},
}

// hlb2Room is Q, which the paper does not state. A larger Q makes all durations longer, in the
// same order.
const hlb2Room = 16

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
	var durations [2][3][4]float64 // by kind (printed equation or chain), scenario and rule
	charts := []chart.Chart{{Title: "Queues apart, by the equation printed"}, {Title: "Markov chain of both queues"}}
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
					Speeds: [2]float64{2, 1}, Weights: scenario.weights, Load: 1, Observed: scenario.observed, Room: hlb2Room, Rule: rule,
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
	r.compareHLB2(durations[0], "")
	r.compareHLB2(durations[1], "chain: ")
	r.remark("The paper calls the pair of queues Markovian, but prints an equation in which each queue evolves by itself and the rate to it does not depend on it. " +
		"What it says of the figure follows from that equation. In the Markov chain itself LSQ, which sees the queues, is better than WCMP, which does not.")
	r.remark("Q is %d here; the paper does not state its own.", hlb2Room)
	return nil
}

// compareHLB2 checks the statements of section III-A.
func (r *run) compareHLB2(d [3][4]float64, method string) {
	before := func(small, large string, a, b float64) { r.before(method+small, large, a, b, 0, inOrder) }
	all, half, wrong := d[0], d[1], d[2]
	before("WCMP", "LSQ, all observed", all[model.WCMP], all[model.LSQ])
	before("SED", "LSQ, all observed", all[model.SED], all[model.LSQ])
	before("LSQ", "ECMP, all observed", all[model.LSQ], all[model.ECMP])
	before("LSQ", "WCMP, half observed", half[model.LSQ], half[model.WCMP])
	before("SED", "WCMP, half observed", half[model.SED], half[model.WCMP])
	before("LSQ all", "half observed", all[model.LSQ], half[model.LSQ])
	before("SED all", "half observed", all[model.SED], half[model.SED])
	before("WCMP right", "wrong weights", all[model.WCMP], wrong[model.WCMP])
	before("SED right", "wrong weights", all[model.SED], wrong[model.SED])
}
