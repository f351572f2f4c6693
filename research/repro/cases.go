// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"strings"

	"github.com/segue-lb/segue/research/chart"
)

// abbreviation is the short name of a placement or a policy, as the papers and charts have it.
type abbreviation struct {
	Name string
	// look is the number of the colour and the marker of the case in all charts. With 0, it is
	// chosen for each figure.
	look int
	// Text spells the name out, and says what the case does.
	Text string
}

// srText describes SRc, for a threshold c.
const srText = "SRc with c = %s: the first of two candidates takes a flow, unless c of its workers are busy"

// abbreviations are the cases of all figures. Each paper has its own colours from 1 to 8.
var abbreviations = []abbreviation{
	{"SC", 1, "single choice: the only candidate of a flow takes it"},
	{"RR (random)", 1, "SRLB's name for single choice: a random server takes a flow"},
	{"SR4", 2, fmt.Sprintf(srText, "4")},
	{"SR8", 3, fmt.Sprintf(srText, "8")},
	{"SR16", 4, fmt.Sprintf(srText, "16")},
	{"SRdyn", 5, "dynamic SRc: each server adapts its threshold c, so that it takes half of its offers"},
	{"SR2", 6, fmt.Sprintf(srText, "2")},
	{"round-robin", 7, "the servers in turn"},
	{"feedback", 8, "round-robin by weights that follow polls of the servers"},

	{"ECMP", 1, "equal-cost multipath: a server by the hash of the flow"},
	{"WCMP", 2, "weighted-cost multipath: by the hash of the flow, in proportion to the capacities"},
	{"AWCMP", 3, "active WCMP: with weights that follow polls of the servers"},
	{"LSQ", 4, "local shortest queue: the server with the fewest of the balancer's own flows"},
	{"LSQ2", 4, "LSQ of two random servers"},
	{"GSQ2", 5, "GSQ of two random servers"},
	{"GSQ", 5, "global shortest queue: the server with the fewest flows of all balancers"},
	{"SED", 6, "shortest expected delay: LSQ, relative to the capacities, which the balancer knows"},
	{"SED2", 6, "SED of two random servers"},
	{"HLB", 7, "hybrid load balancer: SED with capacities that the balancer infers from durations of flows"},
	{"HLB2", 7, "HLB of two random servers"},
	{"HLB-FIX", 0, "HLB with a constant measurement noise in its Kalman filter"},
	{"HLB over the mean", 0, "HLB that divides durations by their mean, and not by their sum"},
	{"Oracle", 8, "knows the remaining work of all flows"},
	{"Oracle2", 8, "Oracle of two random servers"},
}

// caseOf returns the case of the name of a series, such as SC for "SC, 48 servers", or nil.
func caseOf(series string) *abbreviation {
	name, _, _ := strings.Cut(series, ", ")
	for i := range abbreviations {
		if abbreviations[i].Name == name {
			return &abbreviations[i]
		}
	}
	return nil
}

// agree gives each case the same colour in all charts of the figure.
func (r *Result) agree() {
	chart.Agree(r.Charts, func(name string) int {
		if c := caseOf(name); c != nil {
			return c.look
		}
		return 0
	})
}

// Abbreviations returns the cases that the charts have, in the order in which they appear.
func (r Result) Abbreviations() (list []abbreviation) {
	seen := map[string]bool{}
	for _, c := range r.Charts {
		for _, s := range c.Series {
			if a := caseOf(s.Name); a != nil && !seen[a.Name] {
				seen[a.Name] = true
				list = append(list, *a)
			}
		}
	}
	return list
}

// printed marks numbers that the paper states about a series of a chart.
func printed(series string, points ...chart.Point) chart.Series {
	const kind = "stated in the paper"
	return chart.Series{
		Name: series + ", " + kind, Like: series, Kind: kind, Style: chart.Crosses, Points: points,
	}
}

// bound draws a bound that the paper states about a series of a chart.
func bound(series, relation string, y float64) chart.Series {
	return chart.Series{
		Name: fmt.Sprintf("%s, %s %v", series, relation, y), Like: series, Kind: "bound in the paper",
		Style: chart.Level, Points: []chart.Point{{Y: y}},
	}
}
