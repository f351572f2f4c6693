// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"fmt"
	"math"

	"gonum.org/v1/gonum/floats"
)

// Transient follows infinitely many servers under policy SRc over time: equation (1) of 6LB, for
// servers with any number of cores.
type Transient struct {
	load      float64
	cores     int
	threshold int
	// tail has s_1, s_2 and so on of 6LB: s_n is the share of servers with n flows or more.
	tail []float64
	step float64 // the last step size that was exact enough
}

// tolerance bounds the error of each s_n in a step, and the share of servers with more flows than
// the largest n that is followed.
const tolerance = 1e-10

// NewTransient starts with servers that each have the given number of flows. Load, cores and
// threshold are as for SRc. A threshold of 0 is the same as single choice: the first server always
// passes the flow on, and the second one is a random server.
//
// It follows numbers of flows up to a bound: at most one server in 10¹⁰ has so many flows in the
// steady state. The bound is at least 64 above the initial number.
func NewTransient(load float64, cores, threshold, flows int) (*Transient, error) {
	steady, err := SRc(load, cores, threshold)
	if err != nil {
		return nil, err
	}
	if flows < 0 || flows > MaxThreshold {
		return nil, fmt.Errorf("%d flows: must be 0 to %d", flows, MaxThreshold)
	}
	most := max(threshold, cores, flows+64)
	for steady.AtLeast(most) > tolerance {
		most++
	}
	t := &Transient{load: load, cores: cores, threshold: threshold, tail: make([]float64, most), step: 0.01}
	for i := range flows {
		t.tail[i] = 1
	}
	return t, nil
}

// AtLeast returns the share of servers with n flows or more, s_n in 6LB.
func (t *Transient) AtLeast(n int) float64 {
	switch {
	case n <= 0:
		return 1
	case n > len(t.tail):
		return 0
	}
	return t.tail[n-1]
}

// MeanFlows returns the mean number of flows of a server.
func (t *Transient) MeanFlows() float64 { return floats.Sum(t.tail) }

// change writes ds/dt of equation (1) to derivative. tail is s.
func (t *Transient) change(tail, derivative []float64) {
	rejected := 1.0 // share of the servers that reject: s at the threshold
	if t.threshold > 0 {
		rejected = tail[t.threshold-1]
	}
	below := 1.0 // s_(n-1); share is s_n, and above is s_(n+1)
	for i, share := range tail {
		n, above := i+1, 0.0
		if n < len(tail) {
			above = tail[n]
		}
		derivative[i] = arrivals(t.load, t.cores, t.threshold, rejected, i)*(below-share) -
			float64(min(n, t.cores))*(share-above)
		below = share
	}
}

// The pair of methods of Dormand and Prince, fourth and fifth order (J. R. Dormand and P. J.
// Prince, "A Family of Embedded Runge-Kutta Formulae", 1980): the points of the stages, and the
// difference of the two results. The last stage is at the result of the fifth order, so it is the
// first stage of the next step.
var (
	stages = [][]float64{
		{},
		{1. / 5},
		{3. / 40, 9. / 40},
		{44. / 45, -56. / 15, 32. / 9},
		{19372. / 6561, -25360. / 2187, 64448. / 6561, -212. / 729},
		{9017. / 3168, -355. / 33, 46732. / 5247, 49. / 176, -5103. / 18656},
		{35. / 384, 0, 500. / 1113, 125. / 192, -2187. / 6784, 11. / 84},
	}
	difference = []float64{71. / 57600, 0, -71. / 16695, 71. / 1920, -17253. / 339200, 22. / 525, -1. / 40}
)

// Advance moves time forward by a duration, which must not be negative. It computes several steps
// for each unit of time. If the context ends before, Advance returns the context's cause.
func (t *Transient) Advance(ctx context.Context, duration float64) error {
	k := make([][]float64, len(stages))
	for i := range k {
		k[i] = make([]float64, len(t.tail))
	}
	next, wrong := make([]float64, len(t.tail)), make([]float64, len(t.tail))
	for duration > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		step := min(t.step, duration)
		for i, weights := range stages {
			copy(next, t.tail)
			for j, weight := range weights {
				floats.AddScaled(next, step*weight, k[j])
			}
			t.change(next, k[i])
		}
		clear(wrong)
		for j, weight := range difference {
			floats.AddScaled(wrong, step*weight, k[j])
		}
		largest := floats.Norm(wrong, math.Inf(1)) // the error of the step
		if largest <= tolerance {                  // otherwise the step is repeated with a shorter length
			t.tail, next = next, t.tail // the last stage is at the result of the step
			duration -= step
		}
		// The error of a step is in proportion to the fifth power of its length. A last step that
		// was cut short tells nothing about the longest possible step.
		if largest > tolerance || step == t.step {
			t.step = step * min(5, max(0.2, 0.9*math.Pow(tolerance/max(largest, 1e-300), 0.2)))
		}
	}
	return nil
}
