// SPDX-License-Identifier: Apache-2.0

package report

import "github.com/segue-lb/segue/research/testbed"

// cpuRow is a line of the table of CPU times.
type cpuRow struct {
	Case, Point string
	First       bool // it is the first row of its case
	Times       []value
}

// cpuParts returns the names of the columns of the table of CPU times.
func (f *folder) cpuParts() (names []string) {
	for _, part := range testbed.CPUParts {
		names = append(names, part.Name)
	}
	return names
}

// cpuRows returns a line for each case at each point, or nothing if CPU times were not measured.
func (f *folder) cpuRows() (rows []cpuRow) {
	if !f.HasCPU() {
		return nil
	}
	for _, name := range f.Cases {
		for i, x := range f.Points {
			row := cpuRow{Case: name, Point: pointName(f.Axis, x), First: i == 0}
			for _, part := range testbed.CPUParts {
				row.Times = append(row.Times, valueOf(part.Estimate(f.Results, name, x), true))
			}
			rows = append(rows, row)
		}
	}
	return rows
}
