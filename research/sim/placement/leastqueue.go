// SPDX-License-Identifier: Apache-2.0

package placement

import "github.com/segue-lb/segue/research/sim"

// LeastQueue takes the server with the fewest of the balancer's own flows (HLB, section I-B, LSQ).
// least-queue2 compares two random servers.
type LeastQueue struct {
	Own    `yaml:",inline"`
	tables tableCache
}

// Build implements Spec.
func (m *LeastQueue) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }

// New implements sim.Method. A placement that chooses from all servers, and among equals at random,
// has a faster implementation.
func (m *LeastQueue) New(b *sim.Balancer) (sim.Placement, error) {
	if m.Choices > 0 || m.Candidates > 0 || !m.random() {
		return newByScore(b, &m.Own, &m.tables, equalWeights(b))
	}
	p := leastQueue{b: b, open: sim.NewCounts(len(b.Servers))}
	p.MembershipChanged()
	if m.Count == CountPlaced {
		return &placedLeastQueue{p}, nil
	}
	return &p, nil
}

// leastQueue chooses from all servers, and among equals at random. As the scores are counts, it
// needs no infer.Ranking, and takes constant time.
type leastQueue struct {
	b    *sim.Balancer
	open *sim.Counts
}

// choose returns a server with the fewest flows, or -1 if there is no server.
func (p *leastQueue) choose() int32 {
	least := p.open.Least()
	if len(least) == 0 {
		return -1
	}
	return least[p.b.Rand.Intn(len(least))]
}

func (p *leastQueue) Place(_ *sim.Flow, offer *sim.Offer) {
	if s := p.choose(); s >= 0 {
		offer.Set(s)
	}
}

// Connected counts the flow from its first acknowledgement on.
func (p *leastQueue) Connected(f *sim.Flow) { p.open.Add(f.Server) }

// Closed stops counting a flow. A flow that was never connected has not been counted.
func (p *leastQueue) Closed(f *sim.Flow, _ sim.End) {
	if f.Connected {
		p.open.Remove(f.Server)
	}
}

func (p *leastQueue) MembershipChanged() { p.open.SetEligible(p.b.Live) }

// placedLeastQueue counts flows from their SYN.
type placedLeastQueue struct{ leastQueue }

func (p *placedLeastQueue) Place(f *sim.Flow, offer *sim.Offer) {
	if s := p.choose(); s >= 0 {
		offer.Set(s)
		f.Mark = uint32(s) + 1
		p.open.Add(s)
	}
}

// Connected does nothing: the flow is counted already.
func (p *placedLeastQueue) Connected(*sim.Flow) {}

// Closed ignores flows for which there was no server.
func (p *placedLeastQueue) Closed(f *sim.Flow, _ sim.End) {
	if f.Mark > 0 {
		p.open.Remove(int32(f.Mark) - 1)
	}
}
