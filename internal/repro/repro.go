// SPDX-License-Identifier: Apache-2.0

// Package repro makes the figures of the four papers that need no packets, each beside what the paper
// states of it. Numbers of the papers are those that their text, tables and captions state; where they
// say no more than which of two is better, that is what is compared.
package repro

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"path"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/chart"
)

// Figure is a figure of a paper.
type Figure struct {
	// Name is the paper and the figure's number, such as 6lb-8a.
	Name string
	// Title says what the figure shows.
	Title string
	// Source is the section of the paper.
	Source string

	// make draws the figure and compares it.
	make func(ctx context.Context, r *run) error
}

// Result is a figure as it came out.
type Result struct {
	Charts []chart.Chart
	Checks []Check
	// Remarks are what a reader must know to compare the charts with the paper's.
	Remarks []string
}

// Relation is how a measured value relates to the paper's.
type Relation string

// The relations.
const (
	About   Relation = "about"
	AtMost  Relation = "at most"
	AtLeast Relation = "at least"
)

// Check compares one quantity with what the paper states.
type Check struct {
	Figure   string  `json:"figure"`
	Quantity string  `json:"quantity"`
	Paper    Claim   `json:"paper"`
	Measured float64 `json:"measured"`
	// Tolerance is how far the measured value may be from the paper's, or beyond its bound, in the
	// quantity's own unit.
	Tolerance float64 `json:"tolerance"`
	OK        bool    `json:"ok"`
	// Note says why the tolerance is what it is, and what else there is to say.
	Note string `json:"note"`
}

// Claim is what the paper states: a number, or a bound.
type Claim struct {
	Relation Relation
	Value    float64
}

func (c Claim) String() string {
	if c.Relation == About {
		return fmt.Sprintf("%.4g", c.Value)
	}
	return fmt.Sprintf("%s %.4g", c.Relation, c.Value)
}

// MarshalJSON writes a number, or a string such as "at most 0.045".
func (c Claim) MarshalJSON() ([]byte, error) {
	if c.Relation == About {
		return json.Marshal(c.Value)
	}
	return json.Marshal(c.String())
}

// UnmarshalJSON reads what MarshalJSON writes.
func (c *Claim) UnmarshalJSON(b []byte) error {
	if json.Unmarshal(b, &c.Value) == nil {
		c.Relation = About
		return nil
	}
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	for _, relation := range []Relation{AtMost, AtLeast} {
		if rest, ok := strings.CutPrefix(text, string(relation)+" "); ok {
			c.Relation = relation
			_, err := fmt.Sscan(rest, &c.Value)
			return err
		}
	}
	return fmt.Errorf("claim %q: neither a number nor a bound", text)
}

// run is a figure that is being made.
type run struct {
	Settings
	figure string
	result Result
}

func (r *run) draw(c chart.Chart) { r.result.Charts = append(r.result.Charts, c) }

func (r *run) remark(format string, args ...any) {
	r.result.Remarks = append(r.result.Remarks, fmt.Sprintf(format, args...))
}

// about compares with a number that the paper states; why is the reason for the tolerance.
func (r *run) about(quantity string, paper, measured, tolerance float64, why string) {
	r.check(quantity, Claim{About, paper}, measured, tolerance, math.Abs(measured-paper) <= tolerance, why)
}

// atMost compares with what the paper states as upper bound.
func (r *run) atMost(quantity string, paper, measured, tolerance float64, why string) {
	r.check(quantity, Claim{AtMost, paper}, measured, tolerance, measured <= paper+tolerance, why)
}

// atLeast compares with what the paper states as lower bound.
func (r *run) atLeast(quantity string, paper, measured, tolerance float64, why string) {
	r.check(quantity, Claim{AtLeast, paper}, measured, tolerance, measured >= paper-tolerance, why)
}

// before compares two quantities of which the paper states that the first is smaller: their ratio is
// at most 1.
func (r *run) before(smaller, larger string, a, b, tolerance float64, why string) {
	r.atMost(smaller+" / "+larger, 1, a/b, tolerance, why)
}

func (r *run) check(quantity string, paper Claim, measured, tolerance float64, ok bool, why string) {
	r.result.Checks = append(r.result.Checks, Check{
		Figure: r.figure, Quantity: quantity, Paper: paper, Measured: measured, Tolerance: tolerance, OK: ok, Note: why,
	})
}

// finite makes sure that the result can be written as JSON, and drawn.
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
		if bad(c.Measured) {
			return fmt.Errorf("%s: %v is not finite", c.Quantity, c.Measured)
		}
	}
	return nil
}

// Figures returns all figures, by paper and number.
func Figures() []Figure {
	return slices.Concat(srlbFigures, sixLBFigures, shellFigures, hlbFigures)
}

// Select returns the figures that one of the patterns of path.Match describes, such as 6lb-8a, 6lb-8?
// or hlb-*; all without patterns. It fails on a pattern that none matches.
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
			return nil, fmt.Errorf("figure %q: unknown; segue repro --list lists all figures", pattern)
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
