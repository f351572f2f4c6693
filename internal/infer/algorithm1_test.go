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

// TestAddAsPrinted checks that the buffer begins full of zeros, and that the number of servers
// limits the places.
func TestAddAsPrinted(t *testing.T) {
	for servers, want := range map[int]float64{4: 4. / 128, 128: 1, 1000: 1} {
		var r Reservoir
		r.AddAsPrinted(1, 0, servers)
		if mean, ok := r.Mean(); !ok || mean != 1./128 {
			t.Errorf("%d servers, one duration: mean %v", servers, mean)
		}
		for i := range uint64(1000) {
			r.AddAsPrinted(1, i, servers)
		}
		if mean, _ := r.Mean(); math.Abs(mean-want) > 1e-12 {
			t.Errorf("%d servers: mean %v, want %v", servers, mean, want)
		}
	}
}

// TestSpeedsAsPrinted has servers with two, one and no flows of the same duration. A server with
// fewer flows has more zeros in its buffer, so it seems faster. With the other sampling all are
// equal.
func TestSpeedsAsPrinted(t *testing.T) {
	for _, sampling := range []Sampling{AsPrinted, FlowEnds} {
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
		if faster := w[2] > w[1] && w[1] > w[0]; faster != (sampling == AsPrinted) {
			t.Errorf("sampling %d: weights %v", sampling, w)
		}
	}
}
