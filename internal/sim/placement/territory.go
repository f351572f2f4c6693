package placement

import (
	"errors"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/sim"
)

// Territory is infer.Territory, on every balancer: servers have home balancers, and what others have
// is estimated from what one's own servers have.
type Territory struct {
	// Candidates, if not 0, restricts the choice to those of the flow's bucket.
	Candidates int `yaml:"candidates"`
	// Buckets of the table, where Candidates is set; 0 is tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	// Count says from when on a flow is counted.
	Count Count `yaml:"count"`
	// Capacity is "known" (also "") or "learned": in proportion to HLB's weights, and 1 in the mean.
	Capacity string `yaml:"capacity"`
	Weights  `yaml:",inline"`
	tables   tableCache
}

// Build implements Spec.
func (m *Territory) Build() (sim.Method, sim.Policy, error) {
	return m, nil, errors.Join(
		checkCandidates(m.Candidates, 0), checkBuckets(m.Buckets), m.Weights.validate(),
		oneOf("count", m.Count, "", CountPlaced, CountConnected),
		oneOf("capacity", m.Capacity, "", "known", "learned"),
	)
}

// New implements sim.Method.
func (m *Territory) New(b *sim.Balancer) (sim.Placement, error) {
	p := &territory{method: m, capacity: capacities(b), flows: make([]float64, len(b.Servers))}
	p.tally = newTally(b, m.Count, p.add)
	p.table = tableOf{&m.tables, b, m.Buckets, m.Candidates, nil}
	if m.Capacity != "learned" {
		return p, p.arrange()
	}
	p.capacity = equalWeights(b)
	learner := &learningTerritory{territory: p, speeds: m.speeds(len(b.Servers))}
	return learner, p.arrange()
}

type territory struct {
	tally
	method    *Territory
	territory *infer.Territory
	capacity  []float64 // of servers, whether they are live or not
	flows     []float64
	table     tableOf
}

// arrange makes the territory anew, when servers or balancers have changed.
func (p *territory) arrange() error {
	weight := p.capacity
	if p.method.Capacity == "learned" {
		weight = equalWeights(p.b) // what balancers have learned differs
	}
	order, homes := homeOrder(p.b, weight)
	now := make([]float64, len(p.capacity))
	for _, s := range p.b.Live {
		now[s] = p.capacity[s]
	}
	p.territory = infer.NewTerritory(now, order, homes)
	for s, n := range p.flows {
		p.territory.Add(int32(s), n)
	}
	return p.table.build()
}

func (p *territory) add(server int32, by float64) {
	p.flows[server] += by
	p.territory.Add(server, by)
}

func (p *territory) Place(f *sim.Flow, offer *sim.Offer) {
	var best int32
	if p.method.Candidates > 0 {
		best = p.territory.BestOf(p.table.row(f))
	} else {
		best = p.territory.Best()
	}
	if best >= 0 {
		offer.Set(best)
		p.placed(f, best)
	}
}

func (p *territory) Connected(f *sim.Flow) { p.connected(f) }

func (p *territory) Closed(f *sim.Flow, _ sim.End) { p.closed(f) }

func (p *territory) MembershipChanged() { must(p.arrange()) }

// Recover looks at the candidates of the bucket.
func (p *territory) Recover(f *sim.Flow, offer *sim.Offer) { p.table.offerRow(f, offer) }

// learningTerritory knows no capacities.
type learningTerritory struct {
	*territory
	speeds *infer.Speeds
}

func (p *learningTerritory) Interval() float64 { return p.method.interval() }

func (p *learningTerritory) Step() {
	p.speeds.Step()
	sum := 0.0
	for _, s := range p.b.Live {
		sum += p.speeds.Weight(s)
	}
	for _, s := range p.b.Live {
		p.capacity[s] = p.speeds.Weight(s) * float64(len(p.b.Live)) / sum
		p.territory.territory.SetCapacity(s, p.capacity[s])
	}
}

func (p *learningTerritory) Closed(f *sim.Flow, end sim.End) {
	if server, wasConnected := p.closed(f); wasConnected {
		p.speeds.Observe(server, end.Duration, p.b.Rand.Uint64())
	}
}
