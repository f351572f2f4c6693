// SPDX-License-Identifier: Apache-2.0

package infer

import "math/bits"

// ReservoirSize is the number of flow durations that are kept for a server, k in HLB's algorithm 1
// (section VI-E1).
const ReservoirSize = 128

// Reservoir is a sample of the durations of a server's flows. A new duration replaces a random
// one. So the lifetime of an entry, counted in later durations, is distributed exponentially, and
// recent durations count for more.
type Reservoir struct {
	durations [ReservoirSize]float64
	n         int
}

// Add adds a duration, in any unit. Until the reservoir is full, it appends the duration. Later
// the random bits select the duration to replace.
func (r *Reservoir) Add(duration float64, random uint64) {
	if r.n < ReservoirSize {
		r.durations[r.n] = duration
		r.n++
		return
	}
	at, _ := bits.Mul64(random, ReservoirSize)
	r.durations[at] = duration
}

// AddAsPrinted adds a duration as HLB's algorithm 1 does, to a reservoir that only AddAsPrinted
// fills. The buffer is full of zeros at first, and the mean includes them. The place of the
// duration is random % modulus. In line 18 the modulus is N, the number of servers, and not the
// size of the buffer. With fewer servers than places, the later places stay zero. With more
// servers, the place may be behind the end of the buffer, and such a duration is not registered.
// The modulus ReservoirSize corrects this.
func (r *Reservoir) AddAsPrinted(duration float64, random uint64, modulus int) {
	r.n = ReservoirSize
	if at := random % uint64(modulus); at < ReservoirSize {
		r.durations[at] = duration
	}
}

// Durations returns the durations. They are valid until the next Add.
func (r *Reservoir) Durations() []float64 { return r.durations[:r.n] }

// Mean returns the mean of the durations, or false if there are none.
func (r *Reservoir) Mean() (mean float64, ok bool) {
	if r.n == 0 {
		return 0, false
	}
	for _, d := range r.durations[:r.n] {
		mean += d
	}
	return mean / float64(r.n), true
}
