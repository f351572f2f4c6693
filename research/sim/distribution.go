// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"
	"slices"
)

// Distribution is a distribution of times in seconds. The zero value is always 0. Samples come
// from the quantile function, so any distribution takes one random number for each sample.
type Distribution struct {
	shape    shape
	mean     float64
	a, b     float64 // parameters; see the constructors
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

// Exponential is the exponential distribution with the given mean.
func Exponential(mean float64) Distribution {
	return Distribution{shape: exponentialShape, mean: mean}
}

// Uniform is the uniform distribution between low and high.
func Uniform(low, high float64) Distribution {
	return Distribution{shape: uniform, mean: (low + high) / 2, a: low, b: high - low}
}

// Lognormal is the lognormal distribution with the given median. sigma is the standard deviation
// of the logarithm.
func Lognormal(median, sigma float64) Distribution {
	return Distribution{shape: lognormal, mean: median * math.Exp(sigma*sigma/2), a: median, b: sigma}
}

// LognormalMoments is the lognormal distribution with the given mean and standard deviation.
func LognormalMoments(mean, deviation float64) Distribution {
	sigma2 := math.Log1p(deviation * deviation / (mean * mean))
	return Lognormal(mean*math.Exp(-sigma2/2), math.Sqrt(sigma2))
}

// Pareto is the Pareto distribution with the given mean and tail index, which must be more than 1:
// P(X > x) = (minimum/x)^index.
func Pareto(mean, index float64) Distribution {
	return Distribution{shape: pareto, mean: mean, a: mean * (index - 1) / index, b: -1 / index}
}

// Empirical is the distribution in which all of the observed values are equally likely.
func Empirical(observed []float64) Distribution {
	d := Distribution{shape: empirical, observed: slices.Clone(observed)}
	for _, x := range observed {
		d.mean += x / float64(len(observed))
	}
	return d
}

// Mean returns the expected value in seconds.
func (d *Distribution) Mean() float64 { return d.mean }

// zero tells whether all samples are 0.
func (d *Distribution) zero() bool { return d.shape == constant && d.mean == 0 }

// Sample maps 64 random bits to a sample.
func (d *Distribution) Sample(bits uint64) float64 {
	switch d.shape {
	case constant:
		return d.mean
	case exponentialShape:
		return d.mean * exponential(bits)
	case uniform:
		return d.a + d.b*unit(bits)
	case lognormal:
		below1 := min(unit(bits), 1-0x1p-53) // below 1, so that the result is finite
		return d.a * math.Exp(d.b*math.Sqrt2*math.Erfinv(2*below1-1))
	case pareto:
		return d.a * math.Pow(unit(bits), d.b)
	default:
		return d.observed[scale(bits, len(d.observed))]
	}
}
