// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/segue-lb/segue/research/sim"
)

// Rule is the rule by which a check gets its tolerance. The tolerance follows from the paper's
// number, from how it was read, and from how much runs scatter. It never follows from the distance
// between the measured value and the paper's.
type Rule string

// The rules.
const (
	// PrintedDigits allows half a unit of the last digit that the paper prints. It is for computed
	// numbers.
	PrintedDigits Rule = "printed digits"
	// MonteCarlo adds to PrintedDigits the 95% confidence interval of the difference between the
	// mean of the runs here and the mean of as many runs as the paper has. It is for simulated
	// numbers.
	MonteCarlo Rule = "Monte Carlo, 95%"
	// Drawing allows 5%: two curves or bars of a drawing that differ by less look alike. It is for
	// results that the text calls equal, close or different, without a number.
	Drawing Rule = "drawing, 5%"
	// Stated allows no difference. It is for orders and bounds, such as "A is better than B".
	Stated Rule = "as stated"
)

// Rules are all rules, with their descriptions for readers.
var Rules = []struct {
	Rule Rule
	Text string
}{
	{PrintedDigits, "half a unit of the last digit that the paper prints, for computed numbers"},
	{
		MonteCarlo,
		"the printed digits, and the 95% confidence interval of the difference between the mean " +
			"of the runs here and the mean of as many runs as the paper has",
	},
	{
		Drawing,
		"5%, within which two curves of a drawing look alike, where the text says equal, close or " +
			"different without a number",
	},
	{Stated, "nothing, for orders and bounds"},
}

// drawingError is the relative error with which a drawing is read.
const drawingError = 0.05

// numericError is the relative error of computed numbers. Comparisons ignore it.
const numericError = 1e-7

// allowance is a rule with the scatter of the runs.
type allowance struct {
	rule    Rule
	scatter float64 // half the width of the confidence interval; for MonteCarlo only
}

var (
	digits = allowance{rule: PrintedDigits}
	drawn  = allowance{rule: Drawing}
	stated = allowance{rule: Stated}
)

// sampled is the rule MonteCarlo for an estimate e. runs is the number of its runs, and paperRuns
// is that of the paper. The interval of the difference of both means is √(1 + runs/paperRuns) times
// as wide as that of e. If paperRuns is the constant derived, the paper's number is exact, and the
// interval is that of e.
func sampled(e sim.Estimate, runs, paperRuns int) allowance {
	if paperRuns == derived {
		return allowance{MonteCarlo, e.Half}
	}
	return allowance{MonteCarlo, e.Half * math.Sqrt(1+float64(runs)/float64(paperRuns))}
}

// derived, as a number of runs, says that the paper derives its number and does not measure it.
const derived = 0

// tolerance returns the allowed difference from a claim. printed is the number as the paper prints
// it.
func (a allowance) tolerance(c Claim, printed string) float64 {
	rounding := 0.0
	if c.Relation == About {
		rounding = halfUnit(printed)
	}
	switch a.rule {
	case PrintedDigits:
		return rounding
	case MonteCarlo:
		return rounding + a.scatter
	case Drawing:
		return drawingError * math.Abs(c.Value)
	default:
		return 0
	}
}

// halfUnit returns half a unit of the last digit of a number as the paper prints it.
func halfUnit(printed string) float64 {
	_, decimals, _ := strings.Cut(printed, ".")
	return 0.5 * math.Pow10(-len(decimals))
}

// mustParse reads a number that the code quotes from a paper.
func mustParse(printed string) float64 {
	v, err := strconv.ParseFloat(printed, 64)
	if err != nil {
		panic(fmt.Sprintf("repro: %q is not a number", printed))
	}
	return v
}

// about compares with a number, in the form that the paper prints. note explains the quantity or
// the result.
func (r *run) about(quantity, paper string, measured float64, by allowance, note string) {
	r.check(quantity, About, paper, measured, by, note)
}

// atMost compares with an upper bound that the paper states.
func (r *run) atMost(quantity, paper string, measured float64, by allowance, note string) {
	r.check(quantity, AtMost, paper, measured, by, note)
}

// atLeast compares with a lower bound that the paper states.
func (r *run) atLeast(quantity, paper string, measured float64, by allowance, note string) {
	r.check(quantity, AtLeast, paper, measured, by, note)
}

// smaller compares two quantities a and b. The paper states that a is smaller, so a/b must be at
// most 1.
func (r *run) smaller(nameOfA, nameOfB string, a, b float64, note string) {
	r.atMost(nameOfA+" / "+nameOfB, "1", a/b, stated, note)
}

// alike compares a ratio of two quantities that are equal according to the text.
func (r *run) alike(quantity string, ratio float64, note string) {
	r.about(quantity, "1", ratio, drawn, note)
}

// notWorse compares the ratio of two quantities. The text says that the first one, for which small
// is good, is close to the second one or matches it.
func (r *run) notWorse(quantity string, ratio float64, note string) {
	r.atMost(quantity, "1", ratio, drawn, note)
}

// differ compares a ratio of two quantities, at least 1, that differ visibly according to the text.
// So the ratio must exceed 1 by more than a drawing hides.
func (r *run) differ(quantity string, ratio float64, note string) {
	r.check(quantity, MoreThan, "1", ratio, drawn, note)
}

// equal compares an estimated ratio of two quantities that are equal by the paper's derivation.
func (r *run) equal(quantity string, ratio sim.Estimate, note string) {
	r.add(Check{
		Quantity: quantity, Paper: Claim{About, 1}, Measured: ratio.Value, Rule: MonteCarlo,
		Tolerance: ratio.Half, Note: note,
	})
}

// check adds a check of a measured value. paper is the number as the paper prints it.
func (r *run) check(
	quantity string,
	relation Relation,
	paper string,
	measured float64,
	by allowance,
	note string,
) {
	claim := Claim{relation, mustParse(paper)}
	r.add(Check{
		Quantity: quantity, Paper: claim, Measured: measured,
		Rule: by.rule, Tolerance: by.tolerance(claim, paper), Note: note,
	})
}

// add completes a check with its figure and verdict.
func (r *run) add(c Check) {
	c.Figure = r.figure
	c.OK = c.Paper.holds(c.Measured, c.Tolerance+numericError*math.Abs(c.Paper.Value))
	r.result.Checks = append(r.result.Checks, c)
}

// holds tells whether a measured value agrees with the claim.
func (c Claim) holds(measured, tolerance float64) bool {
	switch c.Relation {
	case AtMost:
		return measured <= c.Value+tolerance
	case AtLeast:
		return measured >= c.Value-tolerance
	case MoreThan:
		return measured >= c.Value+tolerance
	default:
		return math.Abs(measured-c.Value) <= tolerance
	}
}
