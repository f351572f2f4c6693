// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/sim"
)

// Hunt are the parameters of placements that offer a flow to several servers in turn.
type Hunt struct {
	// Candidates is how many, 1 to 8.
	Candidates int `yaml:"candidates"`
	// Buckets of the table; 0 is tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	// Random takes any servers as candidates, as SRLB, instead of the bucket's, as 6LB.
	Random bool `yaml:"random"`
	tables tableCache
}

func (m *Hunt) validate() error {
	return errors.Join(checkCandidates(m.Candidates, 1), checkBuckets(m.Buckets))
}

// New implements sim.Method.
func (m *Hunt) New(b *sim.Balancer) (sim.Placement, error) {
	if m.Random {
		return &anyServers{b: b, n: m.Candidates}, nil
	}
	p := &hash{tableOf{&m.tables, b, m.Buckets, m.Candidates, nil}}
	return p, p.build()
}

// anyServers offers a flow to random servers.
type anyServers struct {
	b *sim.Balancer
	n int
}

func (p *anyServers) Place(_ *sim.Flow, offer *sim.Offer) {
	offer.N = int32(len(draw(p.b, offer.Servers[:0], p.n)))
}

// SR is 6LB's SRc (section II-B, algorithm 1).
type SR struct {
	Hunt `yaml:",inline"`
	// Threshold is c: a server takes a flow while it has fewer.
	Threshold int `yaml:"threshold"`
}

// Build implements Spec.
func (m *SR) Build() (sim.Method, sim.Policy, error) {
	err := errors.Join(m.validate(), inRange("threshold", m.Threshold, 0, math.MaxInt32))
	return m, perServer{policy: func() accept.Policy { return accept.Static{Threshold: uint32(m.Threshold)} }}, err
}

// SRDyn is 6LB's SRdyn (section II-B, algorithm 2).
type SRDyn struct {
	Hunt `yaml:",inline"`
	// Window, Epsilon and Initial are those of accept.NewDynamic.
	Window  int     `yaml:"window"`
	Epsilon float64 `yaml:"epsilon"`
	Initial int     `yaml:"initial"`
	// Limit is the paper's n, which the threshold does not exceed: 0 for a server's workers, none if those
	// are not limited, and with FIFO for its processors. The flows that wait for one are busy to the policy,
	// as Apache's threads that wait for a processor are: where they should count, n has to be more.
	Limit int `yaml:"limit"`
}

// Build implements Spec.
func (m *SRDyn) Build() (sim.Method, sim.Policy, error) {
	err := errors.Join(
		m.validate(), inRange("window", m.Window, 1, 1_000_000), inRange("epsilon", m.Epsilon, 0, 0.499999),
		inRange("initial", m.Initial, 0, math.MaxInt32), inRange("limit", m.Limit, 0, math.MaxInt32),
	)
	return m, perServer{func() accept.Policy {
		return accept.NewDynamic(uint32(m.Initial), uint32(m.Window), m.Epsilon)
	}, uint32(m.Limit)}, err
}

// perServer has each server follow a policy of its own. Busy is what the server has open, the capacity
// its limit of workers, or another one that is given.
type perServer struct {
	policy   func() accept.Policy
	capacity uint32
}

// New implements sim.Policy.
func (p perServer) New(*sim.Host) (sim.Agent, error) { return decider{p.policy(), p.capacity}, nil }

type decider struct {
	policy   accept.Policy
	capacity uint32 // 0 for the server's own
}

// Decide asks the policy, unless there is nobody else.
func (d decider) Decide(own sim.Load, offer *sim.Offer) int32 {
	capacity := d.capacity
	if capacity == 0 {
		capacity = uint32(own.Workers)
	}
	if offer.Last() || d.policy.Accepts(acceptLoad(own, capacity)) {
		return offer.At
	}
	return offer.At + 1
}

func acceptLoad(l sim.Load, capacity uint32) accept.Load {
	if capacity == 0 {
		capacity = accept.NoCapacity
	}
	return accept.Load{Busy: uint32(l.Open), Capacity: capacity}
}

// Least is Segue's own policy, accept.Least. A server's capacity is its processors'.
type Least struct {
	Hunt `yaml:",inline"`
	// Chain is how many of the candidates a flow is offered to; 0 is all.
	Chain int `yaml:"chain"`
	// Reports has the balancer order the candidates by what servers said last of their load, in the
	// signals that there are anyway.
	Reports bool `yaml:"reports"`
	// Age is the time in which a report comes closer to the mean of all, by the factor e:
	// the older it is, the less it says. About what flows last is right, and a factor of 4 off does
	// little harm. 0 is for ever.
	Age time.Duration `yaml:"age"`
	// Spare is how many servers a balancer remembers that last said they had a free processor, of its
	// bucket or not (accept.Spare). The newest takes the last place in the list. The flows that go
	// outside their bucket are what is lost when their balancer fails.
	Spare int `yaml:"spare"`
}

// Build implements Spec.
func (m *Least) Build() (sim.Method, sim.Policy, error) {
	err := errors.Join(m.validate(), inRange("chain", m.Chain, 0, m.Candidates),
		inRange("age", m.Age, 0, time.Hour), inRange("spare", m.Spare, 0, mostServers))
	if m.Spare > 0 && !m.Reports {
		err = errors.Join(err, errors.New("spare: with reports only"))
	}
	return m, leastPolicy{}, err
}

// New implements sim.Method.
func (m *Least) New(b *sim.Balancer) (sim.Placement, error) {
	inner, err := m.Hunt.New(b)
	chain := int32(m.Chain)
	if chain == 0 {
		chain = int32(m.Candidates)
	}
	p := &chained{Placement: inner, chain: chain}
	if !m.Reports || err != nil {
		return p, err
	}
	return &reported{
		chained: p, b: b, age: m.Age.Seconds(), last: make([]report, len(b.Servers)), spare: accept.NewSpare(m.Spare),
	}, nil
}

// chained offers a flow to the first of its candidates.
type chained struct {
	sim.Placement
	chain int32
}

func (p *chained) Place(f *sim.Flow, offer *sim.Offer) {
	p.Placement.Place(f, offer)
	offer.N = min(offer.N, p.chain)
}

// Recover looks at all candidates, if they are the bucket's.
func (p *chained) Recover(f *sim.Flow, offer *sim.Offer) {
	if r, ok := p.Placement.(sim.Recoverer); ok {
		r.Recover(f, offer)
	}
}

func (p *chained) MembershipChanged() {
	if m, ok := p.Placement.(sim.Member); ok {
		m.MembershipChanged()
	}
}

// reported orders the candidates by the load that was reported last.
type reported struct {
	*chained
	b     *sim.Balancer
	age   float64
	last  []report
	mean  float64 // of reports, recent ones for more
	spare *accept.Spare
	rank  [sim.MaxChain]candidate
}

// report is what a server said of itself.
type report struct {
	load float64 // open flows for each processor, with one more
	when float64
}

type candidate struct {
	server int32
	load   float64 // as it is taken to be now
}

// meanGain is by how much a report moves the mean of all.
const meanGain = 0.01

func (p *reported) Place(f *sim.Flow, offer *sim.Offer) {
	clear(offer.Loads[:]) // so that those tell who wrote one
	p.Placement.Place(f, offer)
	rank := p.rank[:offer.N]
	for i, s := range offer.Servers[:offer.N] {
		rank[i] = candidate{s, p.load(s)}
	}
	slices.SortStableFunc(rank, func(a, b candidate) int { return cmp.Compare(a.load, b.load) })
	for i := range rank {
		offer.Servers[i] = rank[i].server
	}
	offer.N = min(offer.N, p.chain)
	p.offerSpare(offer)
}

// offerSpare has the last place for a server that is known to be free, beside those of the bucket.
func (p *reported) offerSpare(offer *sim.Offer) {
	s, ok := p.spare.Newest(offer.Servers[:offer.N])
	if !ok {
		return
	}
	offer.N = min(offer.N, p.chain-1)
	offer.Add(s)
}

// load is what a server is taken to have now, going by its last report.
func (p *reported) load(server int32) float64 {
	last := p.last[server]
	if p.age == 0 {
		return last.load
	}
	return p.mean + (last.load-p.mean)*math.Exp((last.when-p.b.Now())/p.age)
}

func (p *reported) report(server int32, load *sim.Load) {
	now := report{float64(load.Open+1) / float64(load.CPUs), p.b.Now()}
	p.last[server] = now
	if p.live(server) { // one that is draining says how it empties
		p.spare.Report(server, acceptLoad(*load, uint32(load.CPUs)))
	}
	p.mean += meanGain * (now.load - p.mean)
}

// Accepted learns from create-stickiness of the server that took the flow, and of those that passed it
// on.
func (p *reported) Accepted(f *sim.Flow, offer *sim.Offer, taker sim.Load) {
	for i := range offer.N {
		if offer.Loads[i].CPUs > 0 {
			p.report(offer.Servers[i], &offer.Loads[i])
		}
	}
	p.report(f.Server, &taker)
}

// Closed learns from remove-stickiness.
func (p *reported) Closed(f *sim.Flow, end sim.End) {
	if end.Load.CPUs > 0 {
		p.report(f.Server, &end.Load)
	}
}

// MembershipChanged forgets servers that are gone.
func (p *reported) MembershipChanged() {
	p.chained.MembershipChanged()
	for s := range p.last {
		if !p.live(int32(s)) {
			p.spare.Forget(int32(s))
		}
	}
}

func (p *reported) live(server int32) bool {
	_, live := slices.BinarySearch(p.b.Live, server)
	return live
}

// leastPolicy is accept.Least.
type leastPolicy struct{}

// New implements sim.Policy.
func (leastPolicy) New(*sim.Host) (sim.Agent, error) { return &leastAgent{}, nil }

type leastAgent struct{ passed [sim.MaxChain]accept.Load }

// Decide implements sim.Agent.
func (a *leastAgent) Decide(own sim.Load, offer *sim.Offer) int32 {
	for i := range offer.At {
		a.passed[i] = acceptLoad(offer.Loads[i], uint32(offer.Loads[i].CPUs))
	}
	answer, back := accept.Least(acceptLoad(own, uint32(own.CPUs)), a.passed[:offer.At], offer.Last())
	switch answer {
	case accept.Take:
		return offer.At
	case accept.Return:
		return int32(back)
	}
	return offer.At + 1
}
