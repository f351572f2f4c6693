// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"

	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/tolerance"
)

// allowance is a rule with the scatter of the runs.
type allowance struct {
	rule    tolerance.Rule
	scatter float64 // half the width of the confidence interval; for MonteCarlo only
}

var (
	digits = allowance{rule: tolerance.PrintedDigits}
	drawn  = allowance{rule: tolerance.Drawing}
	stated = allowance{rule: tolerance.Stated}
)

// sampled is the rule MonteCarlo for an estimate e. runs is the number of its runs, and paperRuns
// is that of the paper, or tolerance.Derived.
func sampled(e sim.Estimate, runs, paperRuns int) allowance {
	return allowance{tolerance.MonteCarlo, tolerance.Scatter(e, runs, float64(paperRuns))}
}

// mustParse reads a statement that the code quotes from a paper.
func mustParse(paper string) tolerance.Printed {
	p, err := tolerance.Parse(paper)
	if err != nil {
		panic(fmt.Sprintf("repro: %v", err))
	}
	return p
}

// about compares with a number, in the form that the paper prints. note explains the quantity or
// the result.
func (r *run) about(quantity, paper string, measured float64, by allowance, note string) {
	r.check(quantity, paper, measured, by, note)
}

// atMost compares with an upper bound that the paper states.
func (r *run) atMost(quantity, paper string, measured float64, by allowance, note string) {
	r.check(quantity, string(tolerance.AtMost)+" "+paper, measured, by, note)
}

// atLeast compares with a lower bound that the paper states.
func (r *run) atLeast(quantity, paper string, measured float64, by allowance, note string) {
	r.check(quantity, string(tolerance.AtLeast)+" "+paper, measured, by, note)
}

// smaller compares two quantities a and b. The paper states that a is smaller, so a/b must be at
// most 1.
func (r *run) smaller(nameOfA, nameOfB string, a, b float64, note string) {
	r.atMost(nameOfA+" / "+nameOfB, "1", a/b, stated, note)
}

// alike compares a ratio of two quantities that are equal according to the text.
func (r *run) alike(quantity string, ratio float64, note string) {
	r.check(quantity, tolerance.Equal, ratio, drawn, note)
}

// notWorse compares the ratio of two quantities. The text says that the first one, for which small
// is good, is close to the second one or matches it.
func (r *run) notWorse(quantity string, ratio float64, note string) {
	r.atMost(quantity, "1", ratio, drawn, note)
}

// differ compares a ratio of two quantities, at least 1, that differ visibly according to the text.
// So the ratio must exceed 1 by more than a drawing hides.
func (r *run) differ(quantity string, ratio float64, note string) {
	r.check(quantity, string(tolerance.MoreThan)+" 1", ratio, drawn, note)
}

// equal compares an estimated ratio of two quantities that are equal by the paper's derivation.
func (r *run) equal(quantity string, ratio sim.Estimate, note string) {
	r.check(quantity, tolerance.Equal, ratio.Value, allowance{tolerance.MonteCarlo, ratio.Half}, note)
}

// because adds to the note of the last check why it is outside, if it is. The reason was tested, or
// is part of a conjecture or of the paper's text.
func (r *run) because(format string, args ...any) {
	c := &r.result.Checks[len(r.result.Checks)-1]
	if !c.OK {
		c.outside(fmt.Sprintf(format, args...))
		r.explained = len(r.result.Checks)
	}
}

// unexplained marks the last check as outside without a reason, if it is outside and because was
// not called for it.
func (r *run) unexplained() {
	if n := len(r.result.Checks); n > r.explained && !r.result.Checks[n-1].OK {
		r.result.Checks[n-1].outside("unexplained")
	}
}

// outside adds the reason to the note of a check that is outside.
func (c *Check) outside(reason string) {
	if c.Note != "" {
		c.Note += "; "
	}
	c.Note += "reason: " + reason
}

// check adds a check of a measured value. paper is a statement that tolerance.Parse reads.
func (r *run) check(quantity, paper string, measured float64, by allowance, note string) {
	r.unexplained() // the check before
	printed := mustParse(paper)
	allowed := by.rule.Allowed(printed, by.scatter)
	r.result.Checks = append(r.result.Checks, Check{
		Figure: r.figure, Quantity: quantity, Paper: printed.Statement, Measured: measured,
		Rule: by.rule, Tolerance: allowed, OK: printed.Excess(measured, allowed) <= 0, Note: note,
	})
}
