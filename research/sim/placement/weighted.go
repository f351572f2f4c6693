// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"math"
	"sort"
	"time"

	"github.com/segue-lb/segue/research/sim"
)

// ECMP takes the server that the flow's hash selects (HLB, section I-B).
type ECMP struct{}

// New implements sim.Method.
func (*ECMP) New(b *sim.Balancer) (sim.Placement, error) { return ecmp{b}, nil }

// Build implements Spec.
func (m *ECMP) Build() (sim.Method, sim.Policy, error) { return m, nil, nil }

type ecmp struct{ b *sim.Balancer }

func (p ecmp) Place(f *sim.Flow, offer *sim.Offer) {
	if s := p.b.ECMP(f); s >= 0 {
		offer.Set(s)
	}
}

func (p ecmp) Recover(f *sim.Flow, offer *sim.Offer) { p.Place(f, offer) }

// WCMP takes servers with probabilities in proportion to their known capacity (HLB, section I-B).
type WCMP struct{}

// New implements sim.Method.
func (*WCMP) New(b *sim.Balancer) (sim.Placement, error) {
	p := &wcmp{b: b, weight: capacities(b)}
	p.MembershipChanged()
	return p, nil
}

// Build implements Spec.
func (m *WCMP) Build() (sim.Method, sim.Policy, error) { return m, nil, nil }

// lottery draws servers by weight.
type lottery struct {
	servers []int32
	sums    []float64 // by index in servers: the sum of the weights up to that server
}

// set sets the weights of the servers. If all weights are 0, the servers count as equal.
func (l *lottery) set(servers []int32, weight func(server int32) float64) {
	l.servers, l.sums = append(l.servers[:0], servers...), l.sums[:0]
	sum := 0.0
	for _, s := range servers {
		sum += weight(s)
		l.sums = append(l.sums, sum)
	}
	if sum > 0 {
		return
	}
	for i := range l.sums {
		l.sums[i] = float64(i + 1)
	}
}

// draw returns the server for a number x from 0 to 1, or -1 if there is no server. If x is random,
// the probabilities of the servers are in proportion to their weights.
func (l *lottery) draw(x float64) int32 {
	if len(l.servers) == 0 {
		return -1
	}
	target := x * l.sums[len(l.sums)-1]
	at := sort.Search(len(l.sums), func(i int) bool { return l.sums[i] > target })
	return l.servers[min(at, len(l.servers)-1)]
}

type wcmp struct {
	b       *sim.Balancer
	weight  []float64
	lottery lottery
}

func (p *wcmp) Place(_ *sim.Flow, offer *sim.Offer) {
	if s := p.lottery.draw(p.b.Rand.Float()); s >= 0 {
		offer.Set(s)
	}
}

func (p *wcmp) MembershipChanged() {
	p.lottery.set(p.b.Live, func(s int32) float64 { return p.weight[s] })
}

// Polled has the parameters of placements that poll the load of all servers.
type Polled struct {
	// Interval is the time from one poll to the next, 1 ms to 1 h.
	Interval time.Duration `yaml:"interval"`
}

func (p *Polled) validate() error { return checkInterval(p.Interval) }

// poll asks all live servers for their load.
type poll struct {
	b      *sim.Balancer
	polled *Polled
}

func (p *poll) Interval() float64 { return p.polled.Interval.Seconds() }

func (p *poll) Step() {
	for _, s := range p.b.Live {
		p.b.Probe(s)
	}
}

// feedback returns the weight of a polled server: its capacity divided by its number of flows plus
// one.
func feedback(load sim.Load) float64 { return load.Capacity / float64(load.Open+1) }

// AWCMP is WCMP with weights from polls of the servers: capacity / (flows + 1). HLB (sections I-B
// and V-C) says that AWCMP knows speeds and polls queue lengths, but does not give the formula.
type AWCMP struct {
	Polled `yaml:",inline"`
}

// New implements sim.Method.
func (m *AWCMP) New(b *sim.Balancer) (sim.Placement, error) {
	p := &awcmp{wcmp: wcmp{b: b, weight: capacities(b)}, poll: poll{b, &m.Polled}}
	p.MembershipChanged()
	return p, nil
}

// Build implements Spec.
func (m *AWCMP) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }

type awcmp struct {
	wcmp
	poll
	stale bool // a weight has changed since the lottery was set
}

func (p *awcmp) Probed(server int32, load sim.Load) {
	p.weight[server] = feedback(load)
	p.stale = true
}

// Place gives changed weights to the lottery first.
func (p *awcmp) Place(f *sim.Flow, offer *sim.Offer) {
	if p.stale { // MembershipChanged sets the lottery with the present weights
		p.MembershipChanged()
		p.stale = false
	}
	p.wcmp.Place(f, offer)
}

// WeightedRoundRobin takes servers in turn, in proportion to weights from polls, capacity / (flows
// + 1). It spreads the turns evenly: a server's next turn is 1/weight after its last one, and the
// earliest turn comes first.
type WeightedRoundRobin struct {
	Polled `yaml:",inline"`
	// Formula tells how weights follow from loads. The default ("") is capacity / (flows + 1).
	Formula Formula `yaml:"formula"`
}

// Formula tells how weights follow from loads.
type Formula string

// Formula6LB has the weights 0.1 + 0.9·exp(-8(b/32)²), where b is the number of busy workers out
// of 32 (6LB, footnote 7).
const Formula6LB Formula = "6lb"

// weight returns the weight of a server that has reported a load.
func (f Formula) weight(load sim.Load) float64 {
	if f == Formula6LB {
		busy := float64(load.Busy) / 32
		return 0.1 + 0.9*math.Exp(-8*busy*busy)
	}
	return feedback(load)
}

// New implements sim.Method. The first weights are the capacities, and the first turns are random,
// so that balancers do not all begin at the same server.
func (m *WeightedRoundRobin) New(b *sim.Balancer) (sim.Placement, error) {
	p := &weightedRoundRobin{
		poll: poll{b, &m.Polled}, formula: m.Formula, weight: capacities(b),
		turn: make([]float64, len(b.Servers)),
	}
	for s := range p.turn {
		p.turn[s] = b.Rand.Float() / p.weight[s]
	}
	return p, nil
}

// Build implements Spec.
func (m *WeightedRoundRobin) Build() (sim.Method, sim.Policy, error) {
	return m, nil, errors.Join(m.validate(), oneOf("formula", m.Formula, "", Formula6LB))
}

type weightedRoundRobin struct {
	poll
	formula Formula
	weight  []float64
	turn    []float64 // by server: the virtual time of its next turn
	now     float64   // the virtual time of the latest turn that a server has taken
}

// Place takes the server whose turn comes first. Its next turn is 1/weight later.
func (p *weightedRoundRobin) Place(_ *sim.Flow, offer *sim.Offer) {
	best := int32(-1)
	for _, s := range p.b.Live {
		if best < 0 || p.turn[s] < p.turn[best] {
			best = s
		}
	}
	if best >= 0 {
		p.now = max(p.now, p.turn[best])
		p.turn[best] = p.now + 1/p.weight[best]
		offer.Set(best)
	}
}

// Probed stores a server's new weight. The time that is left to its next turn changes in inverse
// proportion to the weight.
func (p *weightedRoundRobin) Probed(server int32, load sim.Load) {
	left := (p.turn[server] - p.now) * p.weight[server]
	p.weight[server] = p.formula.weight(load)
	p.turn[server] = p.now + left/p.weight[server]
}

// Twos draws two servers with probabilities in proportion to their capacity. It takes the one with
// fewer of the balancer's own flows per unit of capacity. It is the scheduler twos of IPVS in
// Linux.
type Twos struct {
	// Count tells from which event on a flow is counted.
	Count Count `yaml:"count"`
}

// New implements sim.Method.
func (m *Twos) New(b *sim.Balancer) (sim.Placement, error) {
	p := &twos{b: b, capacity: capacities(b), flows: make([]float64, len(b.Servers))}
	p.tally = newTally(m.Count, func(s int32, by float64) { p.flows[s] += by })
	p.MembershipChanged()
	return p, nil
}

// Build implements Spec.
func (m *Twos) Build() (sim.Method, sim.Policy, error) {
	return m, nil, m.Count.validate()
}

type twos struct {
	tally
	b               *sim.Balancer
	capacity, flows []float64
	lottery         lottery
}

// Place draws two servers, which may be the same one. Without live servers, it makes no offer.
func (p *twos) Place(f *sim.Flow, offer *sim.Offer) {
	s, other := p.lottery.draw(p.b.Rand.Float()), p.lottery.draw(p.b.Rand.Float())
	if s < 0 {
		return
	}
	if p.flows[other]/p.capacity[other] < p.flows[s]/p.capacity[s] {
		s = other
	}
	offer.Set(s)
	p.placed(f, s)
}

func (p *twos) Connected(f *sim.Flow) { p.connected(f) }

func (p *twos) Closed(f *sim.Flow, _ sim.End) { p.closed(f) }

func (p *twos) MembershipChanged() {
	p.lottery.set(p.b.Live, func(s int32) float64 { return p.capacity[s] })
}
