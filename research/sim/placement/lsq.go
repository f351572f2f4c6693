// SPDX-License-Identifier: Apache-2.0

package placement

import "github.com/segue-lb/segue/research/sim"

// LSQ takes the server with the fewest of the balancer's own flows (HLB, section I-B). LSQ2
// compares two random servers.
type LSQ struct {
	Own    `yaml:",inline"`
	tables tableCache
}

// Build implements Spec.
func (m *LSQ) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }

// New implements sim.Method.
func (m *LSQ) New(b *sim.Balancer) (sim.Placement, error) {
	if m.Choices > 0 || m.Candidates > 0 || !m.random() {
		return newByScore(b, &m.Own, &m.tables, equalWeights(b))
	}
	p := lsq{b: b, open: sim.NewCounts(len(b.Servers))}
	p.MembershipChanged()
	if m.Count == CountPlaced {
		return &placedLSQ{p}, nil
	}
	return &p, nil
}

// lsq chooses from all servers, and among equals at random. It does in constant time what other
// placements do with a ranking, because it compares counts.
type lsq struct {
	b    *sim.Balancer
	open *sim.Counts
}

func (p *lsq) choose() int32 {
	least := p.open.Least()
	if len(least) == 0 {
		return -1
	}
	return least[p.b.Rand.Intn(len(least))]
}

func (p *lsq) Place(_ *sim.Flow, offer *sim.Offer) {
	if s := p.choose(); s >= 0 {
		offer.Set(s)
	}
}

// Connected counts the flow from its first acknowledgement on.
func (p *lsq) Connected(f *sim.Flow) { p.open.Add(f.Server) }

func (p *lsq) Closed(f *sim.Flow, _ sim.End) {
	if f.Connected {
		p.open.Remove(f.Server)
	}
}

func (p *lsq) MembershipChanged() { p.open.SetEligible(p.b.Live) }

// placedLSQ counts flows from their SYN.
type placedLSQ struct{ lsq }

func (p *placedLSQ) Place(f *sim.Flow, offer *sim.Offer) {
	if s := p.choose(); s >= 0 {
		offer.Set(s)
		f.Mark = uint32(s) + 1
		p.open.Add(s)
	}
}

// Connected does nothing: the flow is counted already.
func (p *placedLSQ) Connected(*sim.Flow) {}

// Closed ignores flows for which there was no server.
func (p *placedLSQ) Closed(f *sim.Flow, _ sim.End) {
	if f.Mark > 0 {
		p.open.Remove(int32(f.Mark) - 1)
	}
}
