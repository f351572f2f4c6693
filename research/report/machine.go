// SPDX-License-Identifier: Apache-2.0

package report

import (
	"math"

	"github.com/segue-lb/segue/research/testbed"
)

// disturbance is a run that may not be valid, and why: for example, because the machine was the
// bottleneck.
type disturbance struct {
	Case, Point string
	Seed        uint64
	Why         []string
}

// disturbances returns the runs with warnings.
func (f *folder) disturbances() (all []disturbance) {
	for i := range f.Runs {
		if run := &f.Runs[i]; len(run.Warnings) > 0 {
			all = append(all, disturbance{run.Case, pointName(f.Axis, run.Point), run.Seed, run.Warnings})
		}
	}
	return all
}

// machineRow tells how busy the machine was during the runs of a case at a point. Each number is
// that of the worst run.
type machineRow struct {
	Case, Point           string
	First                 bool // it is the first row of its case
	Idle, Generator, Late string
	Disturbed             bool
}

// machineRows returns a row for each case at each point with measurements of the machine.
func (f *folder) machineRows() (rows []machineRow) {
	for _, name := range f.Cases {
		first := true
		for _, x := range f.Points {
			row := machineRow{Case: name, Point: pointName(f.Axis, x), First: first}
			idle, generator, late := math.Inf(1), 0.0, 0.0
			for _, run := range f.runs(name, x) {
				if run.Machine != (testbed.Machine{}) {
					idle = min(idle, run.Machine.Idle)
					generator = max(generator, run.Machine.Generator)
					late = max(late, run.Machine.LateP99)
				}
				row.Disturbed = row.Disturbed || len(run.Warnings) > 0
			}
			if !math.IsInf(idle, 1) {
				row.Idle, row.Generator, row.Late = percent(idle), percent(generator), number(1000*late)
				rows, first = append(rows, row), false
			}
		}
	}
	return rows
}
