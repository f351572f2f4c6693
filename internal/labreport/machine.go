// SPDX-License-Identifier: Apache-2.0

package labreport

import (
	"fmt"
	"math"

	"github.com/segue-lb/segue/internal/testbed"
)

// The limits beyond which the machine may have changed the results of a run.
const (
	leastIdle     = 0.1  // of all cores' time
	mostGenerator = 0.9  // of one core
	mostLateness  = 0.05 // of the mean response time
)

// bottlenecks tells in which ways the machine may have changed the results of a run. A run without
// measurements of the machine has none.
func bottlenecks(run *testbed.Run, speed float64) (found []string) {
	m := run.Machine
	if m == (testbed.Machine{}) {
		return nil
	}
	if m.Idle < leastIdle {
		found = append(found, fmt.Sprintf("only %s of the cores’ time was left", percent(m.Idle)))
	}
	if m.Generator > mostGenerator {
		found = append(found, fmt.Sprintf("the load generator used %s of a core", percent(m.Generator)))
	}
	if late := m.LateP99 * speed; late > mostLateness*run.Measured.Mean {
		found = append(found, fmt.Sprintf("the 99th percentile of the load generator’s lateness was %s of the mean response time",
			percent(late/run.Measured.Mean)))
	}
	return found
}

// disturbance is a run that may not be valid, and why.
type disturbance struct {
	Case, Point string
	Seed        uint64
	Why         []string
}

// disturbances returns the runs with bottlenecks or warnings.
func (f *folder) disturbances() (all []disturbance) {
	for i := range f.Runs {
		run := &f.Runs[i]
		why := append(bottlenecks(run, f.Speed), run.Warnings...)
		if len(why) > 0 {
			all = append(all, disturbance{run.Case, pointName(f.Axis, run.Point), run.Seed, why})
		}
	}
	return all
}

// machineRow tells how much of the machine the runs of a case at a point used: the worst of them.
type machineRow struct {
	Case, Point           string
	First                 bool // of its case
	Idle, Generator, Late string
	Disturbed             bool
}

func (f *folder) machineRows() (rows []machineRow) {
	for _, name := range f.Cases {
		first := true
		for _, x := range f.Points {
			runs := f.runs(name, x)
			if len(runs) == 0 {
				continue
			}
			row := machineRow{Case: name, Point: pointName(f.Axis, x), First: first, Idle: "–", Generator: "–", Late: "–"}
			idle, generator, late, known := math.Inf(1), 0.0, 0.0, false
			for _, run := range runs {
				if run.Machine != (testbed.Machine{}) {
					known = true
					idle = min(idle, run.Machine.Idle)
					generator = max(generator, run.Machine.Generator)
					late = max(late, run.Machine.LateP99)
				}
				row.Disturbed = row.Disturbed || len(bottlenecks(run, f.Speed)) > 0
			}
			if known {
				row.Idle, row.Generator, row.Late = percent(idle), percent(generator), number(1000*late)
			}
			rows, first = append(rows, row), false
		}
	}
	return rows
}
