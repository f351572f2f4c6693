// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"slices"
)

// Arrivals say when flows arrive. They are shared by runs at the same time: Start must not change
// them.
type Arrivals interface {
	// Start returns the arrivals of one run, which draws from r.
	Start(r *Rand) (Source, error)
}

// Source are the arrivals of one run.
type Source interface {
	// Next returns the next flow, which arrives not before the one before. It is not ok when no more
	// flows arrive.
	Next() (next Arrival, ok bool)
	// Close releases what the source holds. It returns an error if there were not all arrivals.
	Close() error
}

// Arrival is when a flow arrives, and what is known of it then.
type Arrival struct {
	At float64 // seconds
	// Class is an index in Config.Jobs, or -1 to have it drawn by the jobs' shares.
	Class int32
	// Size, in units of Stage.PerUnit, is 0 where no trace tells it.
	Size float64
}

// Poisson arrivals are independent of each other, Rate a second in the mean. Where Curve is set it
// multiplies the rate: a non-homogeneous Poisson process.
type Poisson struct {
	Rate  float64
	Curve Curve
}

// Curve is a factor over time.
type Curve interface {
	// Factor is that at a time, never more than Max.
	Factor(at float64) float64
	Max() float64
}

// Start implements Arrivals.
func (p Poisson) Start(r *Rand) (Source, error) {
	if p.Curve == nil {
		return &poisson{r: r, mean: 1 / p.Rate}, nil
	}
	return &thinned{poisson: poisson{r: r, mean: 1 / (p.Rate * p.Curve.Max())}, curve: p.Curve}, nil
}

type poisson struct {
	r    *Rand
	mean float64
	at   float64
	_    cacheLine
}

func (p *poisson) Next() (next Arrival, ok bool) {
	p.at += p.mean * exponential(p.r.Uint64())
	return Arrival{At: p.at, Class: -1}, true
}

func (p *poisson) Close() error { return nil }

// thinned keeps of a Poisson process at the highest rate as many as the curve says (Lewis and
// Shedler, 1979).
type thinned struct {
	poisson
	curve Curve
}

func (t *thinned) Next() (next Arrival, ok bool) {
	for {
		next, _ = t.poisson.Next()
		if t.r.Float()*t.curve.Max() < t.curve.Factor(next.At) {
			return next, true
		}
	}
}

// Diurnal is a day: 1 + Amplitude · sin(2π (t + Phase) / Period).
type Diurnal struct{ Period, Amplitude, Phase float64 }

// Factor implements Curve.
func (d Diurnal) Factor(at float64) float64 {
	return 1 + d.Amplitude*math.Sin(2*math.Pi*(at+d.Phase)/d.Period)
}

// Max implements Curve.
func (d Diurnal) Max() float64 { return 1 + d.Amplitude }

// Points is a curve of straight lines between points, whose times ascend. Before the first and after
// the last the factor is theirs. Two points at one time make a step.
type Points []Point

// Point is a factor at a time.
type Point struct{ At, Factor float64 }

// Factor implements Curve.
func (p Points) Factor(at float64) float64 {
	i, _ := slices.BinarySearchFunc(p, at, func(point Point, at float64) int {
		if point.At <= at {
			return -1
		}
		return 1
	})
	switch {
	case i == 0:
		return p[0].Factor
	case i == len(p):
		return p[i-1].Factor
	}
	before, after := p[i-1], p[i]
	return before.Factor + (after.Factor-before.Factor)*(at-before.At)/(after.At-before.At)
}

// Max implements Curve.
func (p Points) Max() float64 {
	highest := 0.0
	for _, point := range p {
		highest = max(highest, point.Factor)
	}
	return highest
}
