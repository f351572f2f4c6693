// SPDX-License-Identifier: Apache-2.0

package placement

import "github.com/segue-lb/segue/research/sim"

// RoundRobin takes the servers in turn. Each balancer begins at a random server.
type RoundRobin struct{}

// New implements sim.Method.
func (*RoundRobin) New(b *sim.Balancer) (sim.Placement, error) {
	return &roundRobin{b: b, next: b.Rand.Intn(max(len(b.Live), 1))}, nil
}

// Build implements Spec.
func (m *RoundRobin) Build() (sim.Method, sim.Policy, error) { return m, nil, nil }

type roundRobin struct {
	b    *sim.Balancer
	next int
}

// Place offers the flow to the next live server. Without live servers, it makes no offer.
func (p *roundRobin) Place(_ *sim.Flow, offer *sim.Offer) {
	if len(p.b.Live) == 0 {
		return
	}
	if p.next >= len(p.b.Live) {
		p.next = 0
	}
	offer.Set(p.b.Live[p.next])
	p.next++
}
