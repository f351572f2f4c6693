package placement

import "github.com/segue-lb/segue/internal/sim"

// LSQ takes the server with the fewest of the balancer's own flows that are connected (HLB, section
// I-B); of equals one at random.
type LSQ struct{}

// New implements sim.Method.
func (LSQ) New(b *sim.Balancer) (sim.Placement, error) {
	p := &lsq{b: b, open: sim.NewCounts(len(b.Servers))}
	p.MembershipChanged()
	return p, nil
}

type lsq struct {
	b    *sim.Balancer
	open *sim.Counts
}

func (p *lsq) Place(_ *sim.Flow, offer *sim.Offer) {
	if least := p.open.Least(); len(least) > 0 {
		offer.Set(least[p.b.Rand.Intn(len(least))])
	}
}

func (p *lsq) MembershipChanged() { p.open.SetEligible(p.b.Live) }

func (p *lsq) Connected(f *sim.Flow) { p.open.Add(f.Server) }

func (p *lsq) Closed(f *sim.Flow, _ sim.End) {
	if f.Connected {
		p.open.Remove(f.Server)
	}
}

// GSQ takes the server with the fewest open flows of all balancers, by the truth.
type GSQ struct{}

// New implements sim.Method.
func (GSQ) New(b *sim.Balancer) (sim.Placement, error) { return &gsq{b}, nil }

type gsq struct{ b *sim.Balancer }

func (p *gsq) Place(_ *sim.Flow, offer *sim.Offer) {
	best, least := int32(-1), 0
	for _, s := range p.b.Live {
		if open := p.b.World.Open(s); best < 0 || open < least {
			best, least = s, open
		}
	}
	if best >= 0 {
		offer.Set(best)
	}
}

// Oracle takes the server where the flow would end first if nothing came after it (HLB, section V-C):
// it knows the work of all flows, this one's too.
type Oracle struct{}

// New implements sim.Method.
func (Oracle) New(b *sim.Balancer) (sim.Placement, error) { return &oracle{b}, nil }

type oracle struct{ b *sim.Balancer }

func (p *oracle) Place(f *sim.Flow, offer *sim.Offer) {
	best, least := int32(-1), 0.0
	for _, s := range p.b.Live {
		if end := p.b.World.Ends(s, f); best < 0 || end < least {
			best, least = s, end
		}
	}
	if best >= 0 {
		offer.Set(best)
	}
}
