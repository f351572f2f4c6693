// SPDX-License-Identifier: Apache-2.0

package report

import "github.com/segue-lb/segue/research/testbed"

// costRow is a line of the table of CPU times and memory.
type costRow struct {
	Case, Point string
	First       bool // it is the first row of its case
	Costs       []value
}

// costNames returns the names of the columns of the table of CPU times and memory.
func (f *folder) costNames() (names []string) {
	for _, cost := range testbed.Costs {
		names = append(names, cost.Name)
	}
	return names
}

// costRows returns a line for each case at each point, or nothing if CPU times were not measured.
func (f *folder) costRows() (rows []costRow) {
	if !f.HasCPU() {
		return nil
	}
	for _, name := range f.Cases {
		for i, x := range f.Points {
			row := costRow{Case: name, Point: pointName(f.Axis, x), First: i == 0}
			for _, cost := range testbed.Costs {
				row.Costs = append(row.Costs, valueOf(cost.Estimate(f.Results, name, x), true))
			}
			rows = append(rows, row)
		}
	}
	return rows
}
