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
	low, high   float64 // in decades where the axis is logarithmic
	start, size float64
}

// newScale covers the values, or what the axis itself bounds. It has some margin, unless it is exact.
func newScale(axis *Axis, values []float64, start, size float64, exact bool) scale {
	s := scale{axis: axis, start: start, size: size}
	if axis.Min != 0 || axis.Max != 0 {
		s.low, s.high = s.decades(axis.Min), s.decades(axis.Max)
		return s
	}
	s.low, s.high = math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if v = s.decades(v); !math.IsNaN(v) && !math.IsInf(v, 0) {
			s.low, s.high = min(s.low, v), max(s.high, v)
		}
	}
	switch {
	case s.low > s.high: // nothing to show
		s.low, s.high = 0, 1
	case s.low == s.high:
		s.low, s.high = s.low-0.5, s.high+0.5
	}
	switch {
	case exact:
	case axis.Log:
		s.low, s.high = s.logBounds()
	default:
		if s.low > 0 && s.low < s.high/2 {
			s.low = 0
		}
		s.high += 0.03 * (s.high - s.low)
	}
	return s
}

// logFactors are the multiples of powers of ten that axes begin and end with.
var logFactors = []float64{1, 2, 5}

// logBounds are the multiples, in decades, between which the values are.
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

func (s *scale) decades(v float64) float64 {
	if s.axis.Log {
		return math.Log10(v)
	}
	return v
}

func (s *scale) at(v float64) float64 {
	return s.start + s.size*(s.decades(v)-s.low)/(s.high-s.low)
}

// shows tells whether a value has a position; one outside the bounds has, where it is cut off.
func (s *scale) shows(v float64) bool {
	d := s.decades(v)
	return !math.IsNaN(d) && !math.IsInf(d, 0)
}

// clamp is the value, or the bound that it is beyond.
func (s *scale) clamp(v float64) float64 {
	low, high := s.low, s.high
	if s.axis.Log {
		low, high = math.Pow(10, low), math.Pow(10, high)
	}
	return min(max(v, low), high)
}

type tick struct {
	value float64
	label string
}

func (s *scale) ticks() []tick {
	var ticks []tick
	for i, name := range s.axis.Categories {
		ticks = append(ticks, tick{float64(i), name})
	}
	switch {
	case len(ticks) > 0:
		return ticks
	case s.axis.Log:
		return s.logTicks()
	}
	step := roundStep((s.high - s.low) / 6)
	for i := math.Ceil(s.low/step - 1e-9); i*step <= s.high*(1+1e-9); i++ {
		v := i*step + 0 // not -0
		ticks = append(ticks, tick{v, strconv.FormatFloat(v, 'g', 10, 64)})
	}
	return ticks
}

// logTicks are at powers of ten, and at the multiples of those where there are few.
func (s *scale) logTicks() []tick {
	factors := logFactors
	if s.high-s.low > 2.5 {
		factors = []float64{1}
	}
	var ticks []tick
	for decade := math.Floor(s.low); decade <= s.high; decade++ {
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

// superscript is a raised number.
func superscript(n int) string {
	return strings.NewReplacer("-", "⁻", "0", "⁰", "1", "¹", "2", "²", "3", "³", "4", "⁴", "5", "⁵", "6", "⁶",
		"7", "⁷", "8", "⁸", "9", "⁹").Replace(strconv.Itoa(n))
}

// roundStep is the next of 1, 2 and 5 times a power of ten.
func roundStep(step float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(step)))
	for _, factor := range []float64{1, 2, 5} {
		if step <= factor*power {
			return factor * power
		}
	}
	return 10 * power
}
