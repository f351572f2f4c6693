// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"slices"
)

// Norm tells the number by which a server's mean duration is divided before it is filtered.
type Norm uint8

// The norms.
const (
	// BySum is the norm of the paper: z = tau / sum of all tau. With many servers all z are nearly
	// 0, and all exp(-mu) nearly 1: the weights of 128 servers differ by no more than about 1%.
	// Such weights only decide between servers of the same occupancy.
	BySum Norm = iota
	// ByMean makes the mean of z 1, for any number of servers.
	ByMean
)

// Unseen tells which measurement a server gets while there are no durations of its flows.
type Unseen uint8

// The measurements of a server without durations.
const (
	// AsAverage treats the server as an average one, so it is neither preferred nor avoided.
	AsAverage Unseen = iota
	// AsZero makes the server seem infinitely fast until one of its flows has ended.
	AsZero
)

// Sampling tells which durations enter the reservoirs.
type Sampling uint8

// The samplings.
const (
	// FlowEnds adds one duration for each flow, at its end. The mean is that of the durations in
	// the reservoir, even if it is not full.
	FlowEnds Sampling = iota
	// AsPrinted is algorithm 1 of HLB: Observe gets the durations that Algorithm1 registers, and
	// reservoirs begin full of zeros. So Unseen has no effect.
	AsPrinted
	// EveryPacket is AsPrinted with the random index modulo the size of the buffer (AddAsPrinted).
	EveryPacket
)

// Options are choices that HLB leaves open, and a Sampling that differs from the printed one. The
// zero value is the best one in docs/research/placement.md.
type Options struct {
	Norm     Norm
	Unseen   Unseen
	Sampling Sampling
	// FixedNoise keeps the initial R (HLB-FIX of section VI-D1). Otherwise R follows the variance
	// of the measurements.
	FixedNoise bool
}

const (
	initialValue = 0.5  // initial mu (HLB, section IV-B2)
	initialError = 1    // initial P: the first measurement counts for more than the initial mu
	initialNoise = 0.5  // initial R (HLB-FIX, section VI-D1)
	noiseGain    = 0.01 // the paper's alpha, the gain with which R follows the variance
)

// Speeds infers the relative speeds of servers from the durations of their flows.
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

// NewSpeeds begins with n servers of equal weight.
func NewSpeeds(n int, o Options) *Speeds {
	s := &Speeds{options: o, servers: make([]speed, n), noise: initialNoise}
	for i := range s.servers {
		s.Forget(int32(i))
	}
	return s
}

// Forget removes all observations of a server, for example when another server takes its place.
func (s *Speeds) Forget(server int32) {
	s.servers[server] = newSpeed(len(s.servers))
}

func newSpeed(servers int) speed {
	return speed{
		filter: Filter{Value: initialValue, Error: initialError},
		weight: 1 / float64(servers),
	}
}

// Observe records the duration of a flow of a server. All durations must have the same unit.
func (s *Speeds) Observe(server int32, duration float64, random uint64) {
	r := &s.servers[server].reservoir
	switch s.options.Sampling {
	case AsPrinted:
		r.AddAsPrinted(duration, random, len(s.servers))
	case EveryPacket:
		r.AddAsPrinted(duration, random, ReservoirSize)
	default:
		r.Add(duration, random)
	}
}

// SetDurations replaces all observations of a server by a sample that was made elsewhere. Only the
// first ReservoirSize durations count.
func (s *Speeds) SetDurations(server int32, durations []float64) {
	r := &s.servers[server].reservoir
	r.n = copy(r.durations[:], durations)
}

// Rearrange makes server i the server that was from[i]. If that is -1, server i is a new one. Each
// weight keeps its ratio to the average weight. With BySum, estimates are shares of a sum, so they
// keep their ratio to the average share.
func (s *Speeds) Rearrange(from []int32) {
	scale := float64(len(s.servers)) / float64(len(from))
	s.servers = rearranged(s.servers, from, func(int) speed { return newSpeed(len(from)) })
	for i, at := range from {
		if at < 0 {
			continue
		}
		s.servers[i].weight *= scale
		if s.options.Norm == BySum {
			s.servers[i].filter.Value *= scale
			s.servers[i].filter.Error = min(s.servers[i].filter.Error*scale*scale, initialError)
		}
	}
	hasScale := scale > 0 && len(from) > 0 // there were servers, and there are some
	if s.options.Norm == BySum && !s.options.FixedNoise && hasScale {
		s.noise *= scale * scale
	}
}

// Weight returns the weight of a server, above 0. The weights of all servers add up to 1.
func (s *Speeds) Weight(server int32) float64 { return s.servers[server].weight }

// Gain returns the Kalman gain of a server's last step, 0 to 1: how far the estimate moved towards
// the measurement. It is 0 before the first step (HLB, section VI-D1 and figure 18b).
func (s *Speeds) Gain(server int32) float64 { return s.servers[server].gain }

// Step computes new weights from the durations, as the paper does every 0.5 s (section V-C): w =
// exp(-mu) / sum of all exp(-mu). If there are no durations, the weights stay.
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

// measure computes the z of each server, which is the mean duration in its reservoir, divided by
// the norm. It returns false if there are no durations.
func (s *Speeds) measure() bool {
	for i := range s.servers {
		v := &s.servers[i]
		mean, ok := v.reservoir.Mean()
		v.measured = mean // the last loop divides it, which makes it z
		if !ok && s.options.Sampling == FlowEnds {
			v.measured = math.NaN() // no durations
		}
	}
	s.bound()
	sum, seen := 0.0, 0
	for i := range s.servers {
		if mean := s.servers[i].measured; !math.IsNaN(mean) {
			sum += mean
			seen++
		}
	}
	if sum == 0 { // no durations, or all of them are 0
		return false
	}
	average := sum / float64(seen)
	norm := average
	if s.options.Norm == BySum {
		if s.options.Unseen == AsAverage { // servers without durations are in the sum, too
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

// bound bounds the mean durations from above by a multiple of their median, because one flow of a
// client can last for an hour. BySum needs no bound: no weight is more than e times another one. A
// bound from below is not needed either: a server that seems infinitely fast has e times the weight
// of an average server.
func (s *Speeds) bound() {
	if s.options.Norm == BySum || s.options.Sampling != FlowEnds {
		return
	}
	means := make([]float64, 0, len(s.servers))
	for i := range s.servers {
		if mean := s.servers[i].measured; !math.IsNaN(mean) {
			means = append(means, mean)
		}
	}
	if len(means) == 0 {
		return
	}
	slices.Sort(means)
	most := means[(len(means)-1)/2] * mostUnequal
	for i := range s.servers {
		s.servers[i].measured = min(s.servers[i].measured, most) // NaN stays
	}
}

// variance returns the variance of this step's measurements over the servers. The paper does not
// say over what it takes sigma^2(z_i(n)). A single step has no other variance.
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
