// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"slices"
)

// Arrivals tell when flows arrive. Runs that go on at the same time share them, so Start must not
// change them.
type Arrivals interface {
	// Start returns the arrivals of one run. It draws random numbers from r.
	Start(r *Rand) (Source, error)
}

// Source contains the arrivals of one run.
type Source interface {
	// Next returns the next flow. Flows come in the order of their arrival. ok is false if no more
	// flows arrive.
	Next() (next Arrival, ok bool)
	// Close releases the resources of the source. It returns an error if the source could not
	// return all arrivals.
	Close() error
}

// Arrival is a flow that arrives, with its time and the properties that are known at that time.
type Arrival struct {
	At float64 // seconds
	// Class is an index in Config.Jobs. If it is -1, the class is drawn by the jobs' shares.
	Class int32
	// Size is in units of Stage.PerUnit. It is 0 unless a trace gives it.
	Size float64
	// Query is the query in the line of the trace. It is empty without a trace.
	Query string
}

// Poisson arrivals are independent of each other, with a mean rate of Rate per second. Curve, if
// not nil, multiplies the rate: this is a non-homogeneous Poisson process.
type Poisson struct {
	Rate  float64
	Curve Curve
}

// Curve is a factor that depends on time.
type Curve interface {
	// Factor returns the factor at a time. It is never more than Max.
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
	mean float64 // time between flows
	at   float64
	_    cacheLine
}

func (p *poisson) Next() (next Arrival, ok bool) {
	p.at += p.mean * exponential(p.r.Uint64())
	return Arrival{At: p.at, Class: -1}, true
}

func (p *poisson) Close() error { return nil }

// thinned takes a Poisson process at the highest rate, and keeps each flow with the probability
// Factor/Max of the curve (Lewis and Shedler, 1979).
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

// Diurnal is the curve of a day: 1 + Amplitude · sin(2π (t + Phase) / Period).
type Diurnal struct{ Period, Amplitude, Phase float64 }

// Factor implements Curve.
func (d Diurnal) Factor(at float64) float64 {
	return 1 + d.Amplitude*math.Sin(2*math.Pi*(at+d.Phase)/d.Period)
}

// Max implements Curve.
func (d Diurnal) Max() float64 { return 1 + d.Amplitude }

// Points is a curve of straight lines between points in the order of time. Before the first point
// and after the last one, the factor is that of the point. Two points at the same time make a
// step.
type Points []Point

// Point is a factor at a time.
type Point struct{ At, Factor float64 }

// Factor implements Curve. Between two points, it interpolates.
func (p Points) Factor(at float64) float64 {
	// i is the index of the first point after the time.
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
