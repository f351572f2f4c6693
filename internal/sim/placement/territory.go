package placement

import (
	"slices"

	"errors"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/sim"
)

// Territory has servers with home balancers. Where capacities are known it is infer.Territory, which
// estimates what others have from what one's own servers have. Where they are learned, the server with
// the fewest of the balancer's own flows gets the next, and of several the first by infer.Precedence with
// the weights of HLB: it estimates nothing, but durations tell also where others' flows are.
type Territory struct {
	// Candidates, if not 0, restricts the choice to those of the flow's bucket.
	Candidates int `yaml:"candidates"`
	// Buckets of the table, where Candidates is set; 0 is tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	// Count says from when on a flow is counted.
	Count Count `yaml:"count"`
	// Capacity is "known" (also "") or "learned".
	Capacity string `yaml:"capacity"`
	// Interval is that of HLB's weights, where capacities are learned.
	Interval float64 `yaml:"interval"`
	tables   tableCache
}

// Build implements Spec.
func (m *Territory) Build() (sim.Method, sim.Policy, error) {
	var interval error
	if m.Interval != 0 && m.Capacity != "learned" {
		interval = errors.New("interval: for learned capacities only")
	}
	weights := Weights{Interval: m.Interval}
	return m, nil, errors.Join(
		interval, weights.validate(), checkCandidates(m.Candidates, 0), checkBuckets(m.Buckets),
		oneOf("count", m.Count, "", CountPlaced, CountConnected),
		oneOf("capacity", m.Capacity, "", "known", "learned"),
	)
}

// New implements sim.Method.
func (m *Territory) New(b *sim.Balancer) (sim.Placement, error) {
	if m.Capacity == "learned" {
		return newLearnedTerritory(b, m)
	}
	p := &territory{b: b, method: m, capacity: capacities(b), flows: make([]float64, len(b.Servers))}
	p.tally = newTally(m.Count, p.add)
	p.table = tableOf{&m.tables, b, m.Buckets, m.Candidates, nil}
	return p, p.arrange()
}

type territory struct {
	tally
	b         *sim.Balancer
	method    *Territory
	territory *infer.Territory
	capacity  []float64 // of servers, whether they are live or not
	flows     []float64
	table     tableOf
}

// arrange makes the territory anew, when servers or balancers have changed.
func (p *territory) arrange() error {
	order, homes := homeOrder(p.b, p.capacity)
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

// learnedTerritory knows no capacities. It learns as HLB does, but uses weights otherwise.
type learnedTerritory struct {
	*hlb
	near  []int32 // infer.Order
	homes int
}

func newLearnedTerritory(b *sim.Balancer, m *Territory) (sim.Placement, error) {
	own := &Own{Candidates: m.Candidates, Buckets: m.Buckets, Count: m.Count, Ties: TiesHome}
	learner, err := newHLB(b, own, &Weights{Interval: m.Interval}, &m.tables)
	if err != nil {
		return nil, err
	}
	p := &learnedTerritory{hlb: learner}
	p.near, p.homes = homeOrder(b, p.weight)
	p.sort()
	return p, nil
}

// sort orders the servers by what is known of them now.
func (p *learnedTerritory) sort() {
	order := slices.Clone(p.near)
	infer.Precedence(order, p.homes, p.speeds.Weight)
	p.reorder(order)
}

func (p *learnedTerritory) Step() {
	p.speeds.Step()
	p.sort()
}

func (p *learnedTerritory) MembershipChanged() {
	p.hlb.MembershipChanged()
	p.near, p.homes = homeOrder(p.b, p.weight)
	p.sort()
}
