// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"slices"

	"github.com/segue-lb/segue/research/sim"
)

// TWF is tidal water filling ("Distributed dispatching in the parallel server model", Goren,
// Vargaftik and Moses, 2020). Each balancer polls the queues of all servers. From the number of
// flows that it placed itself, it estimates how many flows all balancers will place until the next
// poll. It draws servers with probabilities that bring the queues closest to the same level, if
// all balancers do the same. It assumes equal servers, as the paper does. The rounds of the paper
// are intervals here.
type TWF struct {
	Polled `yaml:",inline"`
}

// New implements sim.Method.
func (m *TWF) New(b *sim.Balancer) (sim.Placement, error) {
	return &twf{poll: poll{b, &m.Polled}, queue: make([]float64, len(b.Servers)), stale: true}, nil
}

// Build implements Spec.
func (m *TWF) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }

type twf struct {
	poll
	queue   []float64
	placed  int     // flows placed since the last step
	coming  float64 // expected flows of all balancers in an interval
	stale   bool    // a queue has changed since the lottery was set
	order   []int32
	lottery lottery
}

// Step estimates how many flows all balancers will place until the next poll: as many as this
// balancer has placed since the last poll, times the number of balancers. Then it polls.
func (p *twf) Step() {
	p.coming, p.placed = float64(p.placed*len(p.b.Peers)), 0
	p.poll.Step()
}

// Probed stores the queue of a polled server.
func (p *twf) Probed(server int32, load sim.Load) {
	p.queue[server] = float64(load.Open)
	p.stale = true
}

func (p *twf) MembershipChanged() { p.stale = true }

// Place draws a server. It first computes the probabilities again if a queue or the servers have
// changed.
func (p *twf) Place(_ *sim.Flow, offer *sim.Offer) {
	if p.stale {
		p.fill()
		p.stale = false
	}
	p.placed++
	if s := p.lottery.draw(p.b.Rand.Float()); s >= 0 {
		offer.Set(s)
	}
}

// fill computes the probabilities. Let n flows arrive, each of which goes to server s with
// probability P(s). The queues come closest to one level, in the mean square, if P(s) is in
// proportion to the distance of the queue of s below a level: that to which n-1 flows would fill
// the queues. This is the paper's closed form: n-1 in place of n accounts for the variance.
func (p *twf) fill() {
	level := p.level(max(p.coming-1, 1))
	p.lottery.set(p.b.Live, func(s int32) float64 { return max(0, level-p.queue[s]) })
}

// level returns the level to which an amount of water fills the lowest queues.
func (p *twf) level(water float64) float64 {
	p.order = append(p.order[:0], p.b.Live...)
	slices.SortFunc(p.order, func(a, b int32) int { return cmp.Compare(p.queue[a], p.queue[b]) })
	sum, level := water, 0.0
	for i, s := range p.order {
		if i > 0 && p.queue[s] >= level { // the water does not reach this queue
			break
		}
		sum += p.queue[s]
		level = sum / float64(i+1)
	}
	return level
}
