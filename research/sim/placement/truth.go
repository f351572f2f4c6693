// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/research/sim"
)

// Truth has the parameters of placements that know what no real balancer can know.
type Truth struct {
	// Choices, if not 0, is the number of random servers that the placement compares, up to 8.
	Choices int `yaml:"choices"`
}

func (t *Truth) validate() error { return inRange("choices", t.Choices, 0, sim.MaxChain) }

// Queues has the parameters of placements that know the queues of all servers.
type Queues struct {
	Truth `yaml:",inline"`
	// Count tells from which event on a server's flow is counted: from its request, which follows
	// the client's first acknowledgement, or from the SYN that the server took.
	Count Count `yaml:"count"`
}

func (q *Queues) validate() error { return errors.Join(q.Truth.validate(), q.Count.validate()) }

// flows returns the number of a server's flows from all balancers, counted as Count says.
func (q *Queues) flows(w sim.World, server int32) float64 {
	if q.Count == CountPlaced {
		return float64(w.Open(server))
	}
	return float64(w.Queued(server))
}

// byTruth takes the server with the smallest cost, and among equals a random one.
type byTruth struct {
	b       *sim.Balancer
	choices int
	cost    func(f *sim.Flow, server int32) float64
	drawn   [sim.MaxChain]int32
}

// Place offers the flow to the cheapest of the live servers, or of some random ones. Without live
// servers, it makes no offer.
func (p *byTruth) Place(f *sim.Flow, offer *sim.Offer) {
	servers := p.b.Live
	if p.choices > 0 {
		servers = draw(p.b, p.drawn[:0], p.choices)
	}
	best, least, ties := int32(-1), 0.0, 0
	for _, s := range servers {
		switch cost := p.cost(f, s); {
		case best < 0 || cost < least:
			best, least, ties = s, cost, 1
		case cost == least:
			// The n-th equal server replaces the others with probability 1/n, so all are
			// equally likely.
			if ties++; p.b.Rand.Intn(ties) == 0 {
				best = s
			}
		}
	}
	if best >= 0 {
		offer.Set(best)
	}
}

// GSQ takes the server with the fewest flows, those of all balancers together. GSQ2 compares two
// random servers (HLB, section I-B).
type GSQ struct {
	Queues `yaml:",inline"`
}

// New implements sim.Method.
func (m *GSQ) New(b *sim.Balancer) (sim.Placement, error) {
	return &byTruth{b: b, choices: m.Choices, cost: func(_ *sim.Flow, s int32) float64 {
		return m.flows(b.World, s)
	}}, nil
}

// Build implements Spec.
func (m *GSQ) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }

// GSED takes the server with the shortest true expected delay: infer.Delay of the flows of all
// balancers and the server's capacity. With equal servers it is the same as GSQ. With unequal
// servers it is a bound for other placements.
type GSED struct {
	Queues `yaml:",inline"`
}

// New implements sim.Method.
func (m *GSED) New(b *sim.Balancer) (sim.Placement, error) {
	return &byTruth{b: b, choices: m.Choices, cost: func(_ *sim.Flow, s int32) float64 {
		return infer.Delay(m.flows(b.World, s), b.Servers[s].Capacity())
	}}, nil
}

// Build implements Spec.
func (m *GSED) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }

// Oracle takes the server that would complete all its work first, including the new flow (HLB,
// section V-C). Oracle2 compares two random servers. They know the work of each flow on a server
// and of the new flow, but not the work of flows on their way.
type Oracle struct {
	Truth `yaml:",inline"`
	// Whole lets one processor do all work of the new flow, so the flow takes at least as long as
	// alone. Otherwise all processors share all work, and a large server that is busy may look as
	// good as an idle one.
	Whole bool `yaml:"whole"`
}

// New implements sim.Method. The cost of a server is the time until it would have done its work and
// that of the new flow. With Whole, it is at least the time of the new flow on one processor.
func (m *Oracle) New(b *sim.Balancer) (sim.Placement, error) {
	return &byTruth{b: b, choices: m.Choices, cost: func(f *sim.Flow, s int32) float64 {
		next := b.World.Next(f)
		done := (b.World.Work(s) + next) / b.Servers[s].Capacity()
		if m.Whole {
			return max(done, next/b.Servers[s].Speed)
		}
		return done
	}}, nil
}

// Build implements Spec.
func (m *Oracle) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }
