// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"time"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/sim"
)

// Territory has servers with home balancers: infer.Territory. Where capacities are known it estimates what
// others have from what one's own servers have. Where they are learned, by infer.Capacities, it learns
// also what others have, from how long flows last.
type Territory struct {
	// Candidates, if not 0, restricts the choice to those of the flow's bucket.
	Candidates int `yaml:"candidates"`
	// Buckets of the table, where Candidates is set; 0 is tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	// Count says from when on a flow is counted.
	Count Count `yaml:"count"`
	// Learned has it learn capacities, which it knows otherwise. A placement's name says it.
	Learned bool
	// Interval is that of new estimates, where capacities are learned: 1 ms to 1 h.
	Interval time.Duration `yaml:"interval"`
	tables   tableCache
}

// Build implements Spec.
func (m *Territory) Build() (sim.Method, sim.Policy, error) {
	var interval error
	if m.Interval != 0 && !m.Learned {
		interval = errors.New("interval: for learned capacities only")
	}
	if m.Learned {
		interval = checkInterval(m.Interval)
	}
	return m, nil, errors.Join(
		interval, checkCandidates(m.Candidates, 0), checkBuckets(m.Buckets),
		oneOf("count", m.Count, "", CountPlaced, CountConnected),
	)
}

// New implements sim.Method.
func (m *Territory) New(b *sim.Balancer) (sim.Placement, error) {
	if m.Learned {
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
	home      []int32
	table     tableOf
}

// arrange makes the territory anew, when servers or balancers have changed.
func (p *territory) arrange() error {
	order, homes := homeOrder(p.b, p.capacity)
	now := make([]float64, len(p.capacity))
	for _, s := range p.b.Live {
		now[s] = p.capacity[s]
	}
	p.territory, p.home = infer.NewTerritory(now, order, homes), order[:homes]
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

// learnedTerritory knows no capacities, but how long it has had how many flows on each server, and when
// one of them ended.
type learnedTerritory struct {
	territory
	learned  *infer.Capacities
	interval float64
	since    []float64 // when a server's flows were last counted
	known    []bool    // of servers, whether they were live
}

func newLearnedTerritory(b *sim.Balancer, m *Territory) (sim.Placement, error) {
	n := len(b.Servers)
	p := &learnedTerritory{
		territory: territory{b: b, method: m, capacity: equalWeights(b), flows: make([]float64, n)},
		learned:   infer.NewCapacities(n), interval: m.Interval.Seconds(),
		since: make([]float64, n), known: make([]bool, n),
	}
	p.tally = newTally(m.Count, p.add)
	p.table = tableOf{&m.tables, b, m.Buckets, m.Candidates, nil}
	return p, p.arrange()
}

// arrange makes the territory anew, in which all have the same share of servers, and has what is learned
// in it.
func (p *learnedTerritory) arrange() error {
	if err := p.territory.arrange(); err != nil {
		return err
	}
	clear(p.known)
	for _, s := range p.b.Live {
		p.known[s] = true
	}
	p.apply()
	return nil
}

// apply has the territory use what is learned.
func (p *learnedTerritory) apply() {
	for _, s := range p.b.Live {
		p.territory.territory.SetCapacity(s, p.learned.Capacity(s))
		p.territory.territory.SetWait(s, p.learned.Wait(s))
	}
}

func (p *learnedTerritory) add(server int32, by float64) {
	p.had(server)
	if by < 0 {
		p.learned.Ended(server, int(p.flows[server]))
	}
	p.territory.add(server, by)
}

// had tells how long the flows of a server have been as many as they are.
func (p *learnedTerritory) had(server int32) {
	now := p.b.Now()
	p.learned.Had(server, int(p.flows[server]), now-p.since[server])
	p.since[server] = now
}

func (p *learnedTerritory) Interval() float64 { return p.interval }

func (p *learnedTerritory) Step() {
	for s := range p.flows {
		p.had(int32(s))
	}
	p.learned.Step(p.interval, p.home)
	p.apply()
}

// MembershipChanged forgets what was learned of servers that have been away.
func (p *learnedTerritory) MembershipChanged() {
	for _, s := range p.b.Live {
		if !p.known[s] {
			p.learned.Forget(s)
		}
	}
	must(p.arrange())
}
