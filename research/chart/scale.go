// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"math"
	"strconv"
	"strings"
)

// scale maps values to positions.
type scale struct {
	axis        *Axis
	low, high   float64 // values at both ends; their decimal logarithms if the axis is logarithmic
	start, size float64 // position of low, and distance from there to high
}

// newScale returns a scale for the bounds that the axis sets. If it sets none, the scale is for the
// values, with some margin unless exact is true.
func newScale(axis *Axis, values []float64, start, size float64, exact bool) scale {
	s := scale{axis: axis, start: start, size: size}
	if axis.Min != 0 || axis.Max != 0 {
		s.low, s.high = s.linear(axis.Min), s.linear(axis.Max)
		return s
	}
	s.low, s.high = math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if v = s.linear(v); !math.IsNaN(v) && !math.IsInf(v, 0) {
			s.low, s.high = min(s.low, v), max(s.high, v)
		}
	}
	switch {
	case s.low > s.high: // there are no values
		s.low, s.high = 0, 1
	case s.low == s.high: // a single value is in the middle of the axis
		s.low, s.high = s.low-0.5, s.high+0.5
	}
	switch {
	case exact:
	case axis.Log:
		s.low, s.high = s.logBounds()
	default:
		if s.low > 0 && s.low < s.high/2 {
			s.low = 0 // the values still use at least half of the axis
		}
		s.high += 0.03 * (s.high - s.low)
	}
	return s
}

// logFactors are the multiples of powers of ten at which logarithmic axes begin and end.
var logFactors = []float64{1, 2, 5}

// logBounds returns the nearest multiples of powers of ten that enclose the values, as decimal
// logarithms.
func (s *scale) logBounds() (low, high float64) {
	low, high = math.Inf(-1), math.Inf(1)
	for decade := math.Floor(s.low) - 1; decade <= s.high+1; decade++ {
		for _, factor := range logFactors {
			d := decade + math.Log10(factor)
			if d <= s.low+1e-9 {
				low = max(low, d)
			}
			if d >= s.high-1e-9 {
				high = min(high, d)
			}
		}
	}
	return low, high
}

// linear returns the number to which a value's distance along the axis is proportional: the decimal
// logarithm if the axis is logarithmic, and otherwise the value.
func (s *scale) linear(v float64) float64 {
	if s.axis.Log {
		return math.Log10(v)
	}
	return v
}

// at returns the position of a value.
func (s *scale) at(v float64) float64 {
	return s.start + s.size*(s.linear(v)-s.low)/(s.high-s.low)
}

// shows tells whether a value has a position. On a logarithmic axis, only positive values have one.
// The position may be outside the axis, where shapes are cut off.
func (s *scale) shows(v float64) bool {
	d := s.linear(v)
	return !math.IsNaN(d) && !math.IsInf(d, 0)
}

// clamp returns the value, or the bound if the value is beyond it.
func (s *scale) clamp(v float64) float64 {
	low, high := s.low, s.high
	if s.axis.Log {
		low, high = math.Pow(10, low), math.Pow(10, high)
	}
	return min(max(v, low), high)
}

// describe names the quantity of the axis and the values at its ends.
func (s *scale) describe() string {
	if n := len(s.axis.Categories); n > 0 {
		return s.axis.Label + ": " + strings.Join(s.axis.Categories, ", ")
	}
	low, high := s.low, s.high
	if s.axis.Log {
		low, high = math.Pow(10, low), math.Pow(10, high)
	}
	text := func(v float64) string { return strconv.FormatFloat(v, 'g', 3, 64) }
	return s.axis.Label + ", " + text(low) + " to " + text(high)
}

type tick struct {
	value float64
	label string
}

// ticks returns ticks at round values. most is about the largest number of them. With categories,
// it returns one tick for each category.
func (s *scale) ticks(most int) []tick {
	var ticks []tick
	for i, name := range s.axis.Categories {
		ticks = append(ticks, tick{float64(i), name})
	}
	switch {
	case len(ticks) > 0:
		return ticks
	case s.axis.Log:
		return s.logTicks(most)
	}
	step := roundStep((s.high - s.low) / float64(most-1))
	for i := math.Ceil(s.low/step - 1e-9); i*step <= s.high*(1+1e-9); i++ {
		v := i*step + 0 // adding 0 turns -0 into 0
		ticks = append(ticks, tick{v, strconv.FormatFloat(v, 'g', 10, 64)})
	}
	return ticks
}

// logTicks returns ticks at the powers of ten. If there are few, it adds ticks at their multiples.
// If there are too many, it leaves some out.
func (s *scale) logTicks(most int) []tick {
	factors := logFactors
	if float64(len(logFactors))*(s.high-s.low) > float64(most) {
		factors = []float64{1}
	}
	// Only every step-th decade has ticks.
	step := max(1, math.Ceil((s.high-s.low)/float64(most)))
	var ticks []tick
	for decade := math.Floor(s.low/step) * step; decade <= s.high; decade += step {
		for _, factor := range factors {
			d := decade + math.Log10(factor)
			if d < s.low-1e-9 || d > s.high+1e-9 {
				continue
			}
			label := number(factor * math.Pow(10, decade))
			if factor == 1 && (decade < -3 || decade > 5) {
				label = "10" + superscript(int(decade))
			}
			ticks = append(ticks, tick{math.Pow(10, d), label})
		}
	}
	return ticks
}

// superscript formats a number in superscript digits.
func superscript(n int) string {
	return strings.NewReplacer("-", "⁻", "0", "⁰", "1", "¹", "2", "²", "3", "³", "4", "⁴", "5", "⁵", "6", "⁶",
		"7", "⁷", "8", "⁸", "9", "⁹").Replace(strconv.Itoa(n))
}

// roundStep returns the next larger product of 1, 2 or 5 and a power of ten.
func roundStep(step float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(step)))
	for _, factor := range []float64{1, 2, 5} {
		if step <= factor*power {
			return factor * power
		}
	}
	return 10 * power
}

// number formats a value with as many digits as it needs, at most six.
func number(v float64) string {
	return strconv.FormatFloat(v, 'g', 6, 64)
}
