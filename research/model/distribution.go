// SPDX-License-Identifier: Apache-2.0

package model

import (
	"fmt"
	"math"

	"gonum.org/v1/gonum/stat/combin"
)

// Transform returns E[exp(-zT)], the Laplace transform of the distribution of response times T,
// for servers that serve flows first come, first served. It is equation (9) of 6LB, which has the
// form of a characteristic function with z = -iθ. The real part of z must be positive, or z must
// be zero.
//
// Unlike (9), Transform sums over the number of flows that a new flow finds. So it has no
// denominator that is zero at z = λ(1+s_c)-1, where the function is not singular. Behind n flows
// on k cores, a flow waits for n-k+1 departures at rate k.
func (s *Steady) Transform(z complex128) complex128 {
	core := 1 / (1 + z)
	departure := complex(float64(s.Cores), 0) / (complex(float64(s.Cores), 0) + z)
	rate := s.Load * float64(s.Cores)
	last := len(s.share) - 1

	sum, wait := complex128(0), complex128(1)
	for n := range last {
		if n >= s.Cores {
			wait *= departure
		}
		sum += complex(s.share[n]*s.arrivals(n)/rate, 0) * wait
	}
	wait *= departure
	tail := complex(s.share[last]*s.arrivals(last)/rate, 0) * wait / (1 - complex(s.ratio, 0)*departure)
	return core * (sum + tail)
}

// eulerTerms is M of the Euler algorithm. The result has 0.6·M digits, and M/3 of the 16 digits of
// a float64 are lost. With M = 16, distribution functions are correct to 1e-9.
const eulerTerms = 16

// eulerWeights are the weights ξ_k of the Euler algorithm, with signs. They are for an alternating
// series of 2M+1 terms. The last M terms have binomial weights (Euler summation).
var eulerWeights = func() (weights [2*eulerTerms + 1]float64) {
	const m = eulerTerms
	rest := 0.0
	for k := 2 * m; k > m; k-- {
		rest += math.Ldexp(float64(combin.Binomial(m, 2*m-k)), -m)
		weights[k] = rest
	}
	for k := 1; k <= m; k++ {
		weights[k] = 1
	}
	weights[0] = 0.5
	for k := 1; k < len(weights); k += 2 {
		weights[k] = -weights[k]
	}
	return weights
}()

// invert returns f(t), t > 0, of the function whose Laplace transform is given, by the Euler
// algorithm (J. Abate and W. Whitt, "A Unified Framework for Numerically Inverting Laplace
// Transforms", INFORMS Journal on Computing 18, 2006, section 5). It needs f to be smooth at t and
// errs by some 1e-9 of its size.
func invert(transform func(complex128) complex128, t float64) float64 {
	const shift = eulerTerms * math.Ln10 / 3
	sum := 0.0
	for k, weight := range eulerWeights {
		z := complex(shift, math.Pi*float64(k))
		sum += weight * real(transform(z/complex(t, 0)))
	}
	return math.Exp(shift) / t * sum
}

// CDF returns Pr(T ≤ t), the probability that a flow is on its server for at most t, for servers
// that serve flows first come, first served. It is the integral of the inverse of (9) in 6LB,
// computed as the inverse of the transform divided by z. It is correct to 1e-8.
func (s *Steady) CDF(t float64) float64 {
	if t <= 0 {
		return 0
	}
	value := invert(func(z complex128) complex128 { return s.Transform(z) / z }, t)
	return min(max(value, 0), 1)
}

// Percentile returns π_x, the response time that x percent of the flows do not exceed: equation
// (10) of 6LB. x must be above 0 and at most MaxPercentile.
func (s *Steady) Percentile(x float64) (float64, error) {
	if !(x > 0 && x <= MaxPercentile) {
		return 0, fmt.Errorf("percentile %v: must be above 0 and at most %v", x, MaxPercentile)
	}
	high := s.MeanResponse()
	for s.CDF(high) < x/100 {
		high *= 2
	}
	return solve(func(t float64) float64 { return s.CDF(t) - x/100 }, 0, high), nil
}

// MaxPercentile is the highest percentile for which the inversion of transforms is exact enough.
const MaxPercentile = 99.9999

// Saving is the saving of servers by policy SRc (6LB, section V-G).
type Saving struct {
	// SingleChoiceLoad and Load are the highest loads that keep the limit, with one candidate and
	// with SRc.
	SingleChoiceLoad, Load float64
	// Ratio is N'/N: the number of servers with SRc, divided by the number with single choice.
	Ratio float64
}

// CompareServers compares how many servers SRc and single choice need to keep the x-th percentile
// of response times at or below the limit: equation (11) of 6LB, which has x = 90. The limit is in
// units of the mean service time. It must be above the percentile of an idle server, -ln(1-x/100).
func CompareServers(x, limit float64, cores, threshold int) (Saving, error) {
	if !(x > 0 && x <= MaxPercentile) {
		return Saving{}, fmt.Errorf("percentile %v: must be above 0 and at most %v", x, MaxPercentile)
	}
	if idle := -math.Log1p(-x / 100); !(limit > idle*1.0001) || limit > 1e4 {
		return Saving{}, fmt.Errorf("limit of %.4g service times: must be above %.4g, "+
			"the percentile of an idle server, and at most 10000", limit, idle)
	}
	if _, err := SRc(0.5, cores, threshold); err != nil {
		return Saving{}, err
	}
	single, err := highestLoad(x, limit, func(load float64) (*Steady, error) {
		return SingleChoice(load, cores)
	})
	if err != nil {
		return Saving{}, err
	}
	load, err := highestLoad(x, limit, func(load float64) (*Steady, error) {
		return SRc(load, cores, threshold)
	})
	if err != nil {
		return Saving{}, err
	}
	return Saving{SingleChoiceLoad: single, Load: load, Ratio: single / load}, nil
}

// highestLoad is π⁻¹ of section V-G: the load at which the x-th percentile equals the limit. at
// returns the steady state at a load.
func highestLoad(x, limit float64, at func(load float64) (*Steady, error)) (float64, error) {
	low, high := 1e-9, 1-1e-9
	for high-low > 1e-9 {
		middle := (low + high) / 2
		s, err := at(middle)
		if err != nil {
			return 0, err
		}
		// Pr(T ≤ limit) decreases with the load. CDF takes one inversion, Percentile takes many.
		if s.CDF(limit) > x/100 {
			low = middle
		} else {
			high = middle
		}
	}
	return low, nil
}
