// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/gonum/stat"

	"github.com/segue-lb/segue/research/sim"
)

// Table returns a table in Markdown of a quantity of claims. It has a row for each point and a column
// for each case. A cell has the mean over the seeds, half of its 95% confidence interval (Student), and
// the simulator's mean in brackets. Times are in milliseconds, those of KindForward in nanoseconds,
// and CPU times of requests in microseconds.
func (r *Results) Table(quantity string) (string, error) {
	if responseQuantities[quantity] == nil && runQuantities[quantity] == nil {
		return "", fmt.Errorf("quantity %q: must be one of %s", quantity, quantityNames())
	}
	head := string(r.Axis.Key)
	if quantity != "mean" {
		head += ", " + quantity
	}
	var b strings.Builder
	fmt.Fprintf(&b, "| %s | %s |\n|%s\n", head, strings.Join(r.Cases, " | "),
		strings.Repeat("---|", 1+len(r.Cases)))
	for _, point := range r.Points {
		fmt.Fprintf(&b, "| %s |", exact(point))
		for _, name := range r.Cases {
			fmt.Fprintf(&b, " %s |", r.cell(name, point, quantity))
		}
		b.WriteByte('\n')
	}
	return b.String(), nil
}

// Estimate returns a quantity of claims, as measured, for a case at a point over the seeds. Its value
// is NaN if the runs do not have it.
func (r *Results) Estimate(quantity, name string, point float64) sim.Estimate {
	c := Claim{Quantity: quantity, Of: name}
	return sim.EstimateOf(c.samples(r, point, measured))
}

// cell returns the text for a case at a point.
func (r *Results) cell(name string, point float64, quantity string) string {
	e := r.Estimate(quantity, name, point)
	if math.IsNaN(e.Value) {
		return "–"
	}
	text := r.inUnit(quantity, e.Value)
	if !math.IsNaN(e.Half) {
		text += " ± " + strings.TrimSuffix(r.inUnit(quantity, e.Half), "%")
	}
	c := Claim{Quantity: quantity, Of: name}
	if s := stat.Mean(c.samples(r, point, simulated), nil); s > 0 {
		text += " (" + r.inUnit(quantity, s) + ")"
	}
	return text
}

// inUnit formats a value of a quantity: shares in percent, times and cycles without decimals.
func (r *Results) inUnit(quantity string, v float64) string {
	switch {
	case quantity == "failed" || quantity == "large":
		return fmt.Sprintf("%.1f%%", 100*v)
	case strings.HasSuffix(quantity, "-cpu"):
		return fmt.Sprintf("%.1f", 1e6*v)
	case quantity == "cycles":
		return fmt.Sprintf("%.0f", v)
	case runQuantities[quantity] != nil:
		return fmt.Sprintf("%.2f", v)
	case r.Kind == KindForward:
		return fmt.Sprintf("%.0f", 1e9*v)
	}
	return fmt.Sprintf("%.0f", 1e3*v)
}

// quantityNames lists the quantities of claims, for errors.
func quantityNames() string {
	names := slices.Sorted(maps.Keys(responseQuantities))
	return strings.Join(append(names, slices.Sorted(maps.Keys(runQuantities))...), ", ")
}
