// SPDX-License-Identifier: Apache-2.0

package infer

import "math/bits"

// ReservoirSize is how many flow durations are kept of a server, k in HLB's algorithm 1 (section VI-E1).
const ReservoirSize = 128

// Reservoir is a sample of the durations of a server's flows. A new one takes the place of a random one,
// so an entry is there for an exponentially distributed number of durations, and fresh ones count for
// more.
type Reservoir struct {
	durations [ReservoirSize]float64
	n         int
}

// Add puts a duration in, in any unit: at the end until the reservoir is full, then in the place that
// the random bits say. (Algorithm 1 prints randomId % N with N the number of servers; only modulo the
// size of the buffer does it reach all of it and nothing else. And it begins with a buffer full of
// zeros, which a mean would take for durations.)
func (r *Reservoir) Add(duration float64, random uint64) {
	if r.n < ReservoirSize {
		r.durations[r.n] = duration
		r.n++
		return
	}
	at, _ := bits.Mul64(random, ReservoirSize)
	r.durations[at] = duration
}

// Mean is that of the durations; false if there are none.
func (r *Reservoir) Mean() (mean float64, ok bool) {
	if r.n == 0 {
		return 0, false
	}
	for _, d := range r.durations[:r.n] {
		mean += d
	}
	return mean / float64(r.n), true
}
