// SPDX-License-Identifier: Apache-2.0

// Package repro makes those figures of the four papers that need no packets, and compares them with
// the statements of the papers. The numbers come from the papers' text, tables and captions. If a
// paper only states which of two results is better, repro checks that.
package repro

import (
	"context"
	"fmt"
	"math"
	"path"
	"slices"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/tolerance"
)

// Figure is a figure of a paper.
type Figure struct {
	// Name is the short name of the paper and the number of the figure, such as 6lb-8a, or the
	// number of a section with statements that have no figure, such as 6lb-II-D.
	Name string
	// Title names the content of the figure.
	Title string
	// Source is the section of the paper.
	Source string

	// make draws the figure and compares it with the paper.
	make func(ctx context.Context, r *run) error
}

// Result is the result of making a figure.
type Result struct {
	Charts []chart.Chart
	Checks []Check
	// Remarks tell readers what they must know to compare the charts with those of the paper.
	Remarks []string
}

// Check compares one quantity with a statement of the paper. Each quantity has one check. A variant
// that is not the paper's is no check, but a remark.
type Check struct {
	Figure   string              `json:"figure"`
	Quantity string              `json:"quantity"`
	Paper    tolerance.Statement `json:"paper"`
	Measured float64             `json:"measured"`
	// Rule is the rule from which the tolerance follows. Tolerance is the allowed difference
	// between the measured value and the paper's value or bound, in the unit of the quantity.
	Rule      tolerance.Rule `json:"rule"`
	Tolerance float64        `json:"tolerance"`
	OK        bool           `json:"ok"`
	// Note explains the quantity or the result.
	Note string `json:"note"`
}

// Verdict is the word for readers.
func (c Check) Verdict() string {
	if c.OK {
		return "inside"
	}
	return "outside"
}

// run is the state while a figure is made.
type run struct {
	Settings
	figure string
	result Result
	// explained is the number of checks up to the last one whose note has a reason.
	explained int
}

func (r *run) draw(c chart.Chart) { r.result.Charts = append(r.result.Charts, c) }

func (r *run) remark(format string, args ...any) {
	r.result.Remarks = append(r.result.Remarks, fmt.Sprintf(format, args...))
}

// finite returns an error that names the first number of the result that is NaN or infinite. Such a
// number can be neither written as JSON nor drawn.
func (r *Result) finite() error {
	bad := func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) }
	for _, c := range r.Charts {
		for _, s := range c.Series {
			for i, p := range s.Points {
				if bad(p.X) || bad(p.Y) || bad(p.Low) || bad(p.High) {
					return fmt.Errorf("chart %q, series %q, point %d: %v is not finite", c.Title, s.Name, i, p)
				}
			}
		}
	}
	for _, c := range r.Checks {
		if bad(c.Measured) || bad(c.Tolerance) {
			return fmt.Errorf("%s: %v ± %v is not finite", c.Quantity, c.Measured, c.Tolerance)
		}
	}
	return nil
}

// Figures returns all figures, ordered by paper and number.
func Figures() []Figure {
	return slices.Concat(srlbFigures, sixLBFigures, shellFigures, hlbFigures)
}

// Select returns the figures that match one of the patterns (of path.Match), such as 6lb-8a,
// 6lb-8? or hlb-*. Without patterns it returns all figures. A pattern without a match is an error.
func Select(patterns ...string) ([]Figure, error) {
	all := Figures()
	if len(patterns) == 0 {
		return all, nil
	}
	chosen := make([]bool, len(all))
	for _, pattern := range patterns {
		found := false
		for i, figure := range all {
			matches, err := path.Match(pattern, figure.Name)
			if err != nil {
				return nil, fmt.Errorf("figure %q: %w", pattern, err)
			}
			if matches {
				chosen[i], found = true, true
			}
		}
		if !found {
			return nil, fmt.Errorf("figure %q: unknown; segue-lab repro --list lists all figures", pattern)
		}
	}
	var figures []Figure
	for i, figure := range all {
		if chosen[i] {
			figures = append(figures, figure)
		}
	}
	return figures, nil
}
