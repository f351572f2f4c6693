// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// Norm says what a server's mean duration is divided by before it is filtered.
type Norm uint8

// The norms.
const (
	// BySum is the paper's: z = tau / sum of all tau. With many servers z is nearly 0 for all, and
	// exp(-mu) nearly 1: of 128 servers no two weights differ by more than about 1%, so they decide
	// between servers of the same occupancy and nothing else.
	BySum Norm = iota
	// ByMean makes z 1 in the mean, whatever the number of servers.
	ByMean
)

// Unseen says what is measured of a server while there are no durations of its flows.
type Unseen uint8

// What can be measured of a server that was not seen.
const (
	// AsAverage takes it for an average one, so it is neither preferred nor avoided.
	AsAverage Unseen = iota
	// AsZero is the paper's, if one reads its buffers' initial (0, 0) as no duration at all: the
	// server looks infinitely fast until a flow of it has ended.
	AsZero
)

// Options are what HLB leaves open or lets one choose. The zero value is what does best in
// docs/placement.md.
type Options struct {
	Norm   Norm
	Unseen Unseen
	// FixedNoise keeps R as it begins (HLB-FIX of section VI-D1) instead of following the
	// measurements' variance.
	FixedNoise bool
}

const (
	initialValue = 0.5  // of mu (HLB, section IV-B2)
	initialError = 1    // of P: the first measurement counts for more than the initial mu
	initialNoise = 0.5  // of R (HLB-FIX, section VI-D1)
	noiseGain    = 0.01 // the paper's alpha, by which R follows
)

// Speeds infers how fast servers are, relative to each other, from how long flows of theirs last.
type Speeds struct {
	options Options
	servers []speed
	noise   float64 // R
}

type speed struct {
	reservoir Reservoir
	filter    Filter
	measured  float64 // z of the last step
	gain      float64 // K of the last step
	weight    float64
}

// NewSpeeds begins with n servers of the same weight.
func NewSpeeds(n int, o Options) *Speeds {
	s := &Speeds{options: o, servers: make([]speed, n), noise: initialNoise}
	for i := range s.servers {
		s.Forget(int32(i))
	}
	return s
}

// Forget makes a server one that nothing is known of, as when another takes its place.
func (s *Speeds) Forget(server int32) {
	s.servers[server] = speed{
		filter: Filter{Value: initialValue, Error: initialError},
		weight: 1 / float64(len(s.servers)),
	}
}

// Observe takes in how long a flow of a server lasted, in any unit but always the same.
func (s *Speeds) Observe(server int32, duration float64, random uint64) {
	s.servers[server].reservoir.Add(duration, random)
}

// Weight is a server's, above 0; those of all servers sum up to 1.
func (s *Speeds) Weight(server int32) float64 { return s.servers[server].weight }

// Gain is the Kalman gain of a server's last step, 0 to 1: how far its estimate has moved towards what
// was measured. It is 0 before the first step (HLB, section VI-D1 and figure 18b).
func (s *Speeds) Gain(server int32) float64 { return s.servers[server].gain }

// Step makes new weights from the durations, as the paper does every 0.5 s (section V-C):
// w = exp(-mu) / sum of all exp(-mu). Without any durations the weights stay.
func (s *Speeds) Step() {
	if !s.measure() {
		return
	}
	if !s.options.FixedNoise {
		s.noise = (1-noiseGain)*s.noise + noiseGain*s.variance()
	}
	sum := 0.0
	for i := range s.servers {
		v := &s.servers[i]
		v.gain = v.filter.Update(v.measured, s.noise)
		v.weight = math.Exp(-v.filter.Value)
		sum += v.weight
	}
	for i := range s.servers {
		s.servers[i].weight /= sum
	}
}

// measure has each server's z, from the means of the reservoirs.
func (s *Speeds) measure() bool {
	sum, seen := 0.0, 0
	for i := range s.servers {
		v := &s.servers[i]
		mean, ok := v.reservoir.Mean()
		v.measured = mean
		if ok {
			sum += mean
			seen++
		} else {
			v.measured = math.NaN()
		}
	}
	if sum == 0 {
		return false
	}
	average := sum / float64(seen)
	norm := average
	if s.options.Norm == BySum {
		if s.options.Unseen == AsAverage {
			sum += average * float64(len(s.servers)-seen)
		}
		norm = sum
	}
	for i := range s.servers {
		v := &s.servers[i]
		switch {
		case !math.IsNaN(v.measured):
		case s.options.Unseen == AsZero:
			v.measured = 0
		default:
			v.measured = average
		}
		v.measured /= norm
	}
	return true
}

// variance is that of this step's measurements over the servers. The paper's sigma^2(z_i(n)) does not
// say over what; a single step has no other.
func (s *Speeds) variance() float64 {
	mean, squares := 0.0, 0.0
	for i := range s.servers {
		mean += s.servers[i].measured
	}
	mean /= float64(len(s.servers))
	for i := range s.servers {
		d := s.servers[i].measured - mean
		squares += d * d
	}
	return squares / float64(len(s.servers))
}
