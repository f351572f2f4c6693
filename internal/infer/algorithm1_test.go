// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"math"
	"slices"
	"testing"
)

// TestAlgorithm1 follows the listing of algorithm 1 of HLB, line by line. The packets come one
// second after the other.
func TestAlgorithm1(t *testing.T) {
	for name, test := range map[string]struct {
		packets   []Packet
		durations []float64 // by packet, 0 for none
		state     State
	}{
		"a flow":                 {[]Packet{Open, Data, Data, Data, End}, []float64{0, 0, 2, 3, 4}, Null},
		"two flows":              {[]Packet{Open, Data, End, Open, Data, End}, []float64{0, 0, 2, 0, 0, 2}, Null},
		"data after the end":     {[]Packet{Open, Data, End, Data}, []float64{0, 0, 2, 0}, Null},
		"data without a SYN":     {[]Packet{Data, End}, []float64{0, 0}, Null},
		"a SYN that is repeated": {[]Packet{Open, Open, Data, Data}, []float64{0, 0, 0, 3}, Conn},
		"a FIN after the SYN":    {[]Packet{Open, End, Data, End}, []float64{0, 0, 0, 0}, Conn},
		"a SYN after that":       {[]Packet{Open, End, Open, Data, End}, []float64{0, 0, 0, 0, 2}, Null},
	} {
		var a Algorithm1
		var got []float64
		for i, p := range test.packets {
			duration, registered := a.Packet(p, float64(10+i))
			if registered != (duration > 0) {
				t.Errorf("%s: packet %d: duration %v, registered %v", name, i, duration, registered)
			}
			got = append(got, duration)
		}
		if !slices.Equal(got, test.durations) || a.state != test.state {
			t.Errorf("%s: durations %v and state %d, want %v and %d", name, got, a.state,
				test.durations, test.state)
		}
	}
}

// TestAddAsPrinted checks that the buffer begins full of zeros, and that the modulus, which is the
// number of servers in the paper, limits the places.
func TestAddAsPrinted(t *testing.T) {
	for modulus, want := range map[int]float64{4: 4. / 128, ReservoirSize: 1, 1000: 1} {
		var r Reservoir
		r.AddAsPrinted(1, 0, modulus)
		if mean, ok := r.Mean(); !ok || mean != 1./128 {
			t.Errorf("%d as the modulus, one duration: mean %v", modulus, mean)
		}
		for i := range uint64(1000) {
			r.AddAsPrinted(1, i, modulus)
		}
		if mean, _ := r.Mean(); math.Abs(mean-want) > 1e-12 {
			t.Errorf("the modulus %d: mean %v, want %v", modulus, mean, want)
		}
	}
}

// TestSpeedsAsPrinted has servers with two, one and no flows of the same duration. A server with
// fewer flows has more zeros in its buffer, so it seems faster. With the other sampling all are
// equal.
func TestSpeedsAsPrinted(t *testing.T) {
	for _, sampling := range []Sampling{AsPrinted, EveryPacket, FlowEnds} {
		s := NewSpeeds(3, Options{Sampling: sampling})
		s.Step() // nothing was measured
		if s.Weight(0) != 1./3 {
			t.Errorf("sampling %d: a weight of %v before any flow", sampling, s.Weight(0))
		}
		s.Observe(0, 1, 0)
		s.Observe(0, 1, 1)
		s.Observe(1, 1, 0)
		s.Step()
		w := [3]float64{s.Weight(0), s.Weight(1), s.Weight(2)}
		if faster := w[2] > w[1] && w[1] > w[0]; faster != (sampling != FlowEnds) {
			t.Errorf("sampling %d: weights %v", sampling, w)
		}
	}
}

// TestHLBAsPrinted computes the weights of three servers by the formulas of section IV-B, and the
// score of a server with flows. Nothing else may change a price: no time since the server was
// added, and no flow that gets no answer.
func TestHLBAsPrinted(t *testing.T) {
	for kind, fixed := range map[Kind]bool{HLB: false, HLBFixed: true} {
		e, err := NewEstimator(Settings{Kind: kind, SlowStart: 3600})
		if err == nil {
			err = e.Arrange(members(3), []string{"x", "y", "z"}, "y")
		}
		if err != nil {
			t.Fatal(err)
		}
		mu, p, r := [3]float64{0.5, 0.5, 0.5}, 1.0, 0.5
		var c Counters
		for step, tau := range [][3]float64{{0, 0.2, 0.3}, {0.1, 0.2, 0.3}, {0.4, 0.1, 0.2}} {
			for s := range tau {
				durations := make([]float64, ReservoirSize) // half of it has zeros
				for i := range ReservoirSize / 2 {
					durations[i] = 2 * tau[s]
				}
				e.Observe(s, durations)
				e.Sample(s, c, 0.5)
			}
			c.Placed += 1000 // none of which is answered
			c.New += 1000
			e.Step(0.5, uint64(step))

			sum, mean, variance := tau[0]+tau[1]+tau[2], 1./3, 0.
			for _, x := range tau {
				variance += (x/sum - mean) * (x/sum - mean) / 3
			}
			if !fixed {
				r = 0.99*r + 0.01*variance
			}
			gain, all := p/(p+r), 0.
			p *= 1 - gain
			for s := range mu {
				mu[s] += gain * (tau[s]/sum - mu[s])
				all += math.Exp(-mu[s])
			}
			for s := range mu {
				weight := math.Exp(-mu[s]) / all
				price := e.Price(s)
				want := NewPrice(1/(3*weight), 0, int(price.Position), false)
				want.Stale = math.MaxUint32
				if price != want {
					t.Errorf("%s, step %d: server %d has the price %+v, want %+v", kind, step, s, price, want)
				}
				if got := price.Score(4, 1000, 0); got != price.Score(4, 0, 0) {
					t.Errorf("%s: flows before CONN count", kind)
				}
				if got := e.Trials(s); got != 0 {
					t.Errorf("%s: %d trials", kind, got)
				}
			}
		}
	}
}
