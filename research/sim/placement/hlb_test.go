// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"slices"
	"testing"

	"github.com/segue-lb/segue/research/sim"
)

// registering records the durations that HLB as printed registers.
type registering struct {
	*HLB
	durations *[]float64
}

func (r registering) New(b *sim.Balancer) (sim.Placement, error) {
	p, err := r.HLB.New(b)
	p.(*printedHLB).register = func(_ int32, duration float64) {
		*r.durations = append(*r.durations, duration)
	}
	return p, err
}

// TestHLBAsPrinted has one flow of 1 s: its SYN is at the balancer at 0 s, its acknowledgement and
// request at 2 s, and its last acknowledgement and FIN at 5 s. All packets after the first
// acknowledgement register the time since the SYN.
func TestHLBAsPrinted(t *testing.T) {
	var durations []float64
	hlb := &HLB{Weights: Weights{Interval: defaultInterval, Sampling: SamplingAsPrinted}}
	c := smallConfig(registering{hlb, &durations})
	c.Servers, c.Balancers, c.Events, c.Connections = c.Servers[:1], c.Balancers[:1], nil, 1
	c.Servers[0].Speed = 1
	c.Jobs = []sim.Job{{Share: 1, Stages: []sim.Stage{{Work: sim.Constant(1)}}}}
	c.Arrivals = sim.Poisson{Rate: 1e9} // practically at 0 s
	c.Network = sim.Network{ServerClient: sim.Constant(2)}
	if _, err := sim.Run(t.Context(), c, sim.Options{Seed: 1, Runs: 1}); err != nil {
		t.Fatal(err)
	}
	if want := []float64{2, 5, 5}; !slices.Equal(durations, want) {
		t.Errorf("registered %v s, want %v s", durations, want)
	}
}
