// SPDX-License-Identifier: Apache-2.0

package sim

import "math"

// golden is 2^64 divided by the golden ratio, the increment of SplitMix64.
const golden = 0x9e3779b97f4a7c15

// Rand is a stream of pseudo-random numbers: SplitMix64 of Steele, Lea and Flood, "Fast splittable
// pseudorandom number generators", OOPSLA 2014. Each purpose has its own stream, so that draws for
// one purpose do not change another.
type Rand struct {
	state uint64
	_     cacheLine
}

// cacheLine separates the data that a run writes all the time from those of runs on other cores.
// Small objects that are allocated one after the other would share a cache line.
type cacheLine [56]byte

// The purposes of streams.
const (
	streamArrivals = 1 + iota
	streamFlows
	streamPlacement
	streamAgent
	streamProbe
	streamFlood
	streamClients
)

// newRand returns the stream of a seed for a purpose. which is the number of the user, if the
// purpose has several users.
func newRand(seed uint64, purpose, which int) *Rand {
	return &Rand{state: mix(mix(seed+golden) + mix(uint64(purpose)<<32+uint64(which)))}
}

// NewRand returns a stream for a caller outside the simulator. Streams of one seed with different
// numbers are independent.
func NewRand(seed uint64, stream int) *Rand { return newRand(seed, stream, 0) }

// Uint64 returns 64 random bits.
func (r *Rand) Uint64() uint64 {
	r.state += golden
	return mix(r.state)
}

// Float returns a random number in (0, 1], uniformly distributed.
func (r *Rand) Float() float64 { return unit(r.Uint64()) }

// Intn returns a random number from 0 to n-1, uniformly distributed. n must be below 2^32.
func (r *Rand) Intn(n int) int { return scale(r.Uint64(), n) }

// scale maps the upper 32 bits to a number from 0 to n-1: bits·n / 2^32. n must be below 2^32.
func scale(bits uint64, n int) int {
	upper := bits >> 32
	return int(upper * uint64(n) >> 32)
}

// mix is the finaliser of SplitMix64: each bit of x changes each bit of the result with
// probability 1/2.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// unit maps random bits to (0, 1], so that the result has a logarithm. Only the last of 2^53
// numbers is rounded to 1.
func unit(bits uint64) float64 { return (float64(bits>>11) + 0.5) * 0x1p-53 }

// exponential maps random bits to the exponential distribution with mean 1.
func exponential(bits uint64) float64 { return -math.Log(unit(bits)) }
