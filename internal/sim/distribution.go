// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"slices"
)

// Distribution is one of times, in seconds. The zero value is constantly zero. It is sampled by its
// quantile function, so that a sample follows from one random number whatever the distribution.
type Distribution struct {
	shape    shape
	mean     float64
	a, b     float64 // parameters, see the constructors
	observed []float64
}

type shape uint8

const (
	constant shape = iota
	exponentialShape
	uniform
	lognormal
	pareto
	empirical
)

// Constant is always x.
func Constant(x float64) Distribution { return Distribution{mean: x} }

// Exponential has the given mean.
func Exponential(mean float64) Distribution {
	return Distribution{shape: exponentialShape, mean: mean}
}

// Uniform is between low and high.
func Uniform(low, high float64) Distribution {
	return Distribution{shape: uniform, mean: (low + high) / 2, a: low, b: high - low}
}

// Lognormal has the given median; sigma is the standard deviation of its logarithm.
func Lognormal(median, sigma float64) Distribution {
	return Distribution{shape: lognormal, mean: median * math.Exp(sigma*sigma/2), a: median, b: sigma}
}

// LognormalMoments is the lognormal distribution of the given mean and standard deviation.
func LognormalMoments(mean, deviation float64) Distribution {
	sigma2 := math.Log1p(deviation * deviation / (mean * mean))
	return Lognormal(mean*math.Exp(-sigma2/2), math.Sqrt(sigma2))
}

// Pareto has the given tail index, more than 1, and mean: P(X > x) = (minimum/x)^index.
func Pareto(mean, index float64) Distribution {
	return Distribution{shape: pareto, mean: mean, a: mean * (index - 1) / index, b: -1 / index}
}

// Empirical takes each of the observed values equally likely.
func Empirical(observed []float64) Distribution {
	d := Distribution{shape: empirical, observed: slices.Clone(observed)}
	for _, x := range observed {
		d.mean += x / float64(len(observed))
	}
	return d
}

// Mean is the expected value in seconds.
func (d *Distribution) Mean() float64 { return d.mean }

// zero tells whether all samples are 0.
func (d *Distribution) zero() bool { return d.shape == constant && d.mean == 0 }

// sample maps random bits to a sample.
func (d *Distribution) sample(bits uint64) float64 {
	switch d.shape {
	case constant:
		return d.mean
	case exponentialShape:
		return d.mean * exponential(bits)
	case uniform:
		return d.a + d.b*unit(bits)
	case lognormal:
		below1 := min(unit(bits), 1-0x1p-53) // so that it is finite
		return d.a * math.Exp(d.b*math.Sqrt2*math.Erfinv(2*below1-1))
	case pareto:
		return d.a * math.Pow(unit(bits), d.b)
	default:
		return d.observed[bits>>32*uint64(len(d.observed))>>32]
	}
}
