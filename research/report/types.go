// SPDX-License-Identifier: Apache-2.0

package report

import "github.com/segue-lb/segue/research/testbed"

// requestTypes are the types of requests that runs may tell apart.
var requestTypes = []string{testbed.TypePage, testbed.TypeStatic}

// typeRow is a line of the table of the response times of a type of request.
type typeRow struct {
	Case, Point, Type string
	First             bool // it is the first row of its case
	Times             []value
}

// ofType selects the response times of a type of request.
func ofType(name string) source {
	return func(run *testbed.Run) *testbed.Response {
		if r, ok := run.Types[name]; ok {
			return &r
		}
		return nil
	}
}

// types returns a line for each case, point and type of request.
func (f *folder) types() (rows []typeRow) {
	for _, name := range f.Cases {
		first := true
		for _, x := range f.Points {
			for _, kind := range requestTypes {
				runs := f.runs(name, x)
				if _, ok := estimate(runs, ofType(kind), measures[0], milliseconds); !ok {
					continue
				}
				rows = append(rows, typeRow{
					Case: name, Point: pointName(f.Axis, x), Type: kind, First: first,
					Times: timesOf(runs, ofType(kind), measures, milliseconds),
				})
				first = false
			}
		}
	}
	return rows
}

// typeSections returns a section for each type of request, with the distributions of its response
// times, as figure 8 of HLB.
func (f *folder) typeSections() (sections []section) {
	for _, kind := range requestTypes {
		sections = append(sections, f.distributions("Distribution of response times: "+kind,
			"Response times: "+kind, "cdf-"+fileName(kind), ofType(kind)))
	}
	return sections
}
