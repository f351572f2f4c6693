// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"slices"

	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/testbed"
)

// useRow is a line of the table of how servers are used (HLB, section VI-A2). It is about all
// servers of one capacity, in a case at a point.
type useRow struct {
	Case, Point string
	First       bool // it is the first row of its case and point
	Servers     string
	Share, CPU  string
	Mean, Busy  string
	// These numbers are about all servers. Only the first line of a case at a point has them.
	Fairness, Overprovision, Estimates value
}

// use returns the table of how servers are used, for all cases at all points. It returns nothing if
// the capacities of the servers are not known.
func (f *folder) use() (rows []useRow) {
	for _, name := range f.Cases {
		for _, x := range f.Points {
			for i, row := range useOf(f.runs(name, x)) {
				row.Case, row.Point, row.First = name, pointName(f.Axis, x), i == 0
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// useOf returns a row for each capacity, the largest first. It returns none if no capacity is
// known, or if there were no responses.
func useOf(runs []*testbed.Run) (rows []useRow) {
	servers := serverShares(runs)
	requests, capacity := 0.0, 0.0
	var capacities []float64
	for _, s := range servers {
		requests += float64(s.Responses)
		capacity += s.Capacity
		if s.Capacity > 0 && !slices.Contains(capacities, s.Capacity) {
			capacities = append(capacities, s.Capacity)
		}
	}
	if requests == 0 {
		return nil
	}
	slices.Sort(capacities)
	slices.Reverse(capacities)
	for _, c := range capacities {
		n, served, time, busy := 0.0, 0.0, 0.0, 0.0
		for _, s := range servers {
			if s.Capacity == c {
				n++
				served += float64(s.Responses)
				time += float64(s.Responses) * s.Mean
				busy += s.Busy
			}
		}
		cpu := unknown
		if load := runs[0].Load; load > 0 { // it is 0 if the work of the requests is not known
			// The requests use load·capacity of all servers. These n servers have served a share of
			// them, and have the capacity n·c.
			cpu = percent(load * capacity * served / requests / (n * c))
		}
		rows = append(rows, useRow{
			Servers: fmt.Sprintf("%.0f × %s", n, plain(c)), Share: percent(served / requests),
			CPU: cpu, Mean: number(1000 * time / max(served, 1)), Busy: number(busy / n),
		})
	}
	if len(rows) > 0 {
		first := &rows[0]
		first.Fairness = ofRuns(runs, func(r *testbed.Run) float64 { return r.Fairness })
		first.Overprovision = ofRuns(runs, func(r *testbed.Run) float64 { return r.Overprovision })
		first.Estimates = ofRuns(runs, (*testbed.Run).EstimateRatio)
	}
	return rows
}

// ofRuns returns the mean of a number over the runs that have it.
func ofRuns(runs []*testbed.Run, of func(*testbed.Run) float64) value {
	var values []float64
	for _, run := range runs {
		if v := of(run); !math.IsNaN(v) {
			values = append(values, v)
		}
	}
	return valueOf(sim.EstimateOf(values), len(values) > 0)
}
