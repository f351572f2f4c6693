// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"time"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/research/sim"
)

// Territory gives servers home balancers (infer.Territory). If it knows the capacities, it
// estimates the flows of other balancers from its own flows on its home servers. Otherwise
// infer.Capacities learns the capacities and the flows of other balancers.
type Territory struct {
	// Candidates, if not 0, restricts the choice to that number of candidates of the flow's
	// bucket.
	Candidates int `yaml:"candidates"`
	// Buckets is the number of buckets of the table if Candidates is not 0. 0 stands for
	// tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	// Count tells from which event on a flow is counted.
	Count Count `yaml:"count"`
	// Learned makes the placement learn capacities instead of knowing them. The name of the
	// placement determines it.
	Learned bool
	// Interval is the time between two estimates of learned capacities, 1 ms to 1 h.
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
		m.Count.validate(),
	)
}

// New implements sim.Method.
func (m *Territory) New(b *sim.Balancer) (sim.Placement, error) {
	if m.Learned {
		return newLearnedTerritory(b, m)
	}
	p := &territory{b: b, method: m, capacity: capacities(b), flows: make([]float64, len(b.Servers))}
	p.tally = newTally(m.Count, p.add)
	p.table = bucketTable{
		cache: &m.tables, b: b, buckets: m.Buckets, candidates: m.Candidates,
	}
	return p, p.arrange()
}

type territory struct {
	tally
	b         *sim.Balancer
	method    *Territory
	territory *infer.Territory
	capacity  []float64 // by server, live or not
	flows     []float64 // by server: the flows of this balancer
	home      []int32   // the balancer's home servers
	table     bucketTable
}

// arrange builds the territory again, after servers or balancers have changed.
func (p *territory) arrange() error {
	order, homes := homeOrder(p.b, p.capacity)
	present := make([]float64, len(p.capacity)) // capacities; 0 if the server is not live
	for _, s := range p.b.Live {
		present[s] = p.capacity[s]
	}
	p.territory, p.home = infer.NewTerritory(present, order, homes), order[:homes]
	for s, n := range p.flows {
		p.territory.Add(int32(s), n)
	}
	return p.table.build()
}

func (p *territory) add(server int32, by float64) {
	p.flows[server] += by
	p.territory.Add(server, by)
}

// Place offers the flow to the best server of the territory, or to the best of the bucket's
// candidates. Without such a server, it makes no offer.
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

// Recover returns the candidates of the bucket.
func (p *territory) Recover(f *sim.Flow, offer *sim.Offer) { p.table.offerRow(f, offer) }

// learnedTerritory does not know capacities. It learns them from two things: for how long a server
// had each number of the balancer's flows, and when a flow ended.
type learnedTerritory struct {
	territory
	learned  *infer.Capacities
	interval float64
	since    []float64 // by server: the time of the last call of the method had
	known    []bool    // by server: whether it was live at the last change of servers or balancers
}

// newLearnedTerritory returns a placement that takes all servers for equal until it has learned
// their capacities.
func newLearnedTerritory(b *sim.Balancer, m *Territory) (sim.Placement, error) {
	n := len(b.Servers)
	p := &learnedTerritory{
		territory: territory{b: b, method: m, capacity: equalWeights(b), flows: make([]float64, n)},
		learned:   infer.NewCapacities(n), interval: m.Interval.Seconds(),
		since: make([]float64, n), known: make([]bool, n),
	}
	p.tally = newTally(m.Count, p.add)
	p.table = bucketTable{
		cache: &m.tables, b: b, buckets: m.Buckets, candidates: m.Candidates,
	}
	return p, p.arrange()
}

// arrange builds the territory again. It gives all balancers equal shares of the servers, because
// all capacities are 1 here. Then it applies what was learned.
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

// apply applies what was learned to the territory.
func (p *learnedTerritory) apply() {
	for _, s := range p.b.Live {
		p.territory.territory.SetCapacity(s, p.learned.Capacity(s))
		p.territory.territory.SetWait(s, p.learned.Wait(s))
	}
}

// add changes the number of flows on a server, and records what can be learned from that.
func (p *learnedTerritory) add(server int32, by float64) {
	p.had(server)
	if by < 0 {
		p.learned.Ended(server, int(p.flows[server]), 1)
	}
	p.territory.add(server, by)
}

// had records for how long a server has had its present number of flows. It is called before each
// change of the number.
func (p *learnedTerritory) had(server int32) {
	now := p.b.Now()
	p.learned.Had(server, int(p.flows[server]), now-p.since[server])
	p.since[server] = now
}

func (p *learnedTerritory) Interval() float64 { return p.interval }

// Step records for how long each server has had its present flows, and learns from that. Then it
// applies what was learned.
func (p *learnedTerritory) Step() {
	for s := range p.flows {
		p.had(int32(s))
	}
	p.learned.Step(p.interval, p.home)
	p.apply()
}

// MembershipChanged forgets what was learned about servers that were not live before and are now.
func (p *learnedTerritory) MembershipChanged() {
	for _, s := range p.b.Live {
		if !p.known[s] {
			p.learned.Forget(s)
		}
	}
	must(p.arrange())
}
