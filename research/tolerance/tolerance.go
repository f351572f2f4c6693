// SPDX-License-Identifier: Apache-2.0

// Package tolerance has the rules by which results here are compared with statements of papers. The
// tolerance of a comparison follows from the paper's number, from how it was read, and from how
// much runs scatter. It never follows from the distance between the result and the paper's number.
package tolerance

import (
	"math"

	"github.com/segue-lb/segue/research/sim"
)

// Rule is the rule by which a comparison gets its tolerance.
type Rule string

// The rules.
const (
	// PrintedDigits allows half a unit of the last digit that the paper prints. It is for computed
	// numbers.
	PrintedDigits Rule = "printed digits"
	// MonteCarlo adds to PrintedDigits the 95% confidence interval of the difference between the
	// mean of the runs here and the mean of as many runs as the paper has. It is for simulated and
	// measured numbers.
	MonteCarlo Rule = "Monte Carlo, 95%"
	// Drawing allows 5%: two curves or bars of a drawing that differ by less look alike. It is for
	// results that the text calls equal, close or different, without a number.
	Drawing Rule = "drawing, 5%"
	// Stated allows no difference. It is for orders and bounds, such as "A is better than B".
	Stated Rule = "as stated"
)

// Rules are all rules, with their names in files of experiments, and their descriptions for
// readers.
var Rules = []struct {
	Rule Rule
	Key  string
	Text string
}{
	{
		PrintedDigits, "digits",
		"half a unit of the last digit that the paper prints, for computed numbers",
	},
	{
		MonteCarlo, "monte-carlo",
		"the printed digits, and the 95% confidence interval of the difference between the mean " +
			"of the runs here and the mean of as many runs as the paper has",
	},
	{
		Drawing, "drawing",
		"5%, within which two curves of a drawing look alike, where the text says equal, close or " +
			"different without a number",
	},
	{Stated, "stated", "nothing, for orders and bounds"},
}

// Named returns the rule with a name in files of experiments.
func Named(key string) (Rule, bool) {
	for _, r := range Rules {
		if r.Key == key {
			return r.Rule, true
		}
	}
	return "", false
}

// drawingError is the relative error with which a drawing is read.
const drawingError = 0.05

// numericError is the relative error of computed numbers. Comparisons ignore it.
const numericError = 1e-7

// Derived, as a number of runs, says that a number is derived and not measured.
const Derived = 0

// Scatter returns half of the 95% confidence interval of the difference between an estimate and a
// paper's number. runs is the number of runs of the estimate, and paperRuns is that of the paper,
// in units of runs of the estimate's length. The interval of the difference of both means is √(1 +
// runs/paperRuns) times as wide as that of the estimate. If paperRuns is Derived, the paper's number
// is exact, and the interval is that of the estimate.
func Scatter(e sim.Estimate, runs int, paperRuns float64) float64 {
	if paperRuns == Derived {
		return e.Half
	}
	return e.Half * math.Sqrt(1+float64(runs)/paperRuns)
}

// Allowed returns the difference from a statement that a rule allows. scatter is the result of
// Scatter, which only MonteCarlo uses.
func (r Rule) Allowed(p Printed, scatter float64) float64 {
	switch r {
	case PrintedDigits:
		return p.Rounding
	case MonteCarlo:
		return p.Rounding + scatter
	case Drawing:
		return drawingError * math.Abs(p.Value)
	default:
		return 0
	}
}
