// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/research/sim"
)

// Hunt are the parameters of placements that offer a flow to several servers in turn.
type Hunt struct {
	// Candidates is the number of servers to which a flow is offered, 1 to 8.
	Candidates int `yaml:"candidates"`
	// Buckets is the number of buckets of the table. 0 stands for tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	// Random makes random servers the candidates, as in SRLB. Otherwise the candidates are those of
	// the bucket, as in 6LB.
	Random bool `yaml:"random"`
	// Weighted gives servers weights in the table by their capacities (TableWeights). Otherwise all
	// have the same weight.
	Weighted bool `yaml:"weighted"`
	tables   tableCache
}

func (m *Hunt) validate() error {
	var weights error
	if m.Random && m.Weighted {
		weights = errors.New("weighted: not with random, which uses no weights")
	}
	return errors.Join(checkCandidates(m.Candidates, 1), checkBuckets(m.Buckets), weights)
}

// New implements sim.Method. The placement offers a flow to all candidates in turn.
func (m *Hunt) New(b *sim.Balancer) (sim.Placement, error) {
	if m.Random {
		return &anyServers{b: b, n: m.Candidates}, nil
	}
	p := &hash{bucketTable{
		cache: &m.tables, b: b, buckets: m.Buckets, candidates: m.Candidates, weighted: m.Weighted,
	}}
	return p, p.build()
}

// anyServers offers a flow to random servers.
type anyServers struct {
	b *sim.Balancer
	n int
}

// Place lets draw write the servers into the array of the offer.
func (p *anyServers) Place(_ *sim.Flow, offer *sim.Offer) {
	offer.N = int32(len(draw(p.b, offer.Servers[:0], p.n)))
}

// SR is 6LB's SRc (section II-B, algorithm 1).
type SR struct {
	Hunt `yaml:",inline"`
	// Threshold is c: a server takes a flow while it has fewer than c flows.
	Threshold int `yaml:"threshold"`
}

// Build implements Spec.
func (m *SR) Build() (sim.Method, sim.Policy, error) {
	err := errors.Join(m.validate(), inRange("threshold", m.Threshold, 0, math.MaxInt32))
	return m, perServer{
		policy: func(*sim.Host) accept.Policy { return accept.Static{Threshold: uint32(m.Threshold)} },
	}, err
}

// SRDyn is 6LB's SRdyn (section II-B, algorithm 2).
type SRDyn struct {
	Hunt `yaml:",inline"`
	// Window, Epsilon and Initial are the arguments of accept.NewDynamic.
	Window  int     `yaml:"window"`
	Epsilon float64 `yaml:"epsilon"`
	Initial int     `yaml:"initial"`
	// WindowTime is the shortest time of a window, 0 to 1 h. The paper has none (0).
	WindowTime time.Duration `yaml:"window-time"`
	// Limit is the paper's n, the maximum threshold. 0 stands for the number of flows that the
	// server serves at once: its processors with FIFO, and otherwise its workers. If the workers
	// have no limit, the threshold has none. The policy compares the threshold with all open flows
	// of a server, also those that wait. So flows can wait on a server only with a larger n.
	Limit int `yaml:"limit"`
}

// Build implements Spec.
func (m *SRDyn) Build() (sim.Method, sim.Policy, error) {
	err := errors.Join(
		m.validate(), inRange("window", m.Window, 1, 1_000_000), inRange("epsilon", m.Epsilon, 0, 0.499999),
		inRange("initial", m.Initial, 0, math.MaxInt32), inRange("limit", m.Limit, 0, math.MaxInt32),
		inRange("window-time", m.WindowTime, 0, time.Hour),
	)
	return m, perServer{func(h *sim.Host) accept.Policy {
		policy := accept.NewDynamic(uint32(m.Initial), uint32(m.Window), m.Epsilon)
		if m.WindowTime == 0 {
			return policy
		}
		return policy.WithWindowTime(m.WindowTime, func() time.Duration {
			return time.Duration(h.Now() * float64(time.Second))
		})
	}, uint32(m.Limit)}, err
}

// perServer gives each server an accept policy of its own. The policy counts all open flows as busy
// workers. The number of workers is the field capacity or, if the field is 0, the limit of the
// server's workers.
type perServer struct {
	policy   func(*sim.Host) accept.Policy
	capacity uint32
}

// New implements sim.Policy.
func (p perServer) New(h *sim.Host) (sim.Agent, error) {
	return decider{p.policy(h), p.capacity}, nil
}

type decider struct {
	policy   accept.Policy
	capacity uint32 // 0 stands for the server's own limit
}

// Decide asks the policy, unless no other server is left.
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

// acceptLoad returns a load as accept policies know it. A capacity of 0 stands for none.
func acceptLoad(l sim.Load, capacity uint32) accept.Load {
	if capacity == 0 {
		capacity = accept.NoCapacity
	}
	return accept.Load{Busy: uint32(l.Open), Capacity: capacity}
}

// Least is Segue's own policy, accept.Least. The capacity of a server is its number of processors.
type Least struct {
	Hunt `yaml:",inline"`
	// Chain is the number of candidates to which a flow is offered. 0 stands for all.
	Chain int `yaml:"chain"`
	// Reports lets the balancer order the candidates by the loads that servers reported last, in
	// signals that exist anyway.
	Reports bool `yaml:"reports"`
	// Age is the time in which the difference between a report and the mean of all reports shrinks
	// by the factor e, because an older report says less. The best value is about the duration of
	// flows. A value that is 4 times as large or small does little harm. 0 means no ageing.
	Age time.Duration `yaml:"age"`
	// ReportOthers tells which loads of other servers a create-stickiness signal carries: those of
	// all servers that passed the flow on ("" or all), only that of the first candidate (first), or
	// none (none).
	ReportOthers ReportOthers `yaml:"report-others"`
	// Coded reports the loads in 8 bits each, as signals on the wire do (accept.Code).
	Coded bool `yaml:"coded"`
	// IgnoreIdle makes servers ignore connections that are answered and kept open, as with the load
	// source apache-scoreboard. Otherwise such connections count, as with the load source connections.
	IgnoreIdle bool `yaml:"ignore-idle"`
	// Spare is the number of servers that a balancer remembers because they last reported a free
	// processor. They need not be in the flow's bucket (accept.Spare). The most recent one gets
	// the last place in the list. If the balancer fails, the flows outside their bucket are lost.
	Spare int `yaml:"spare"`
}

// ReportOthers is a selection of the servers that passed a flow on.
type ReportOthers string

// The selections.
const (
	ReportAll   ReportOthers = "all"
	ReportFirst ReportOthers = "first"
	ReportNone  ReportOthers = "none"
)

// Build implements Spec. It refuses parameters that need Reports without it.
func (m *Least) Build() (sim.Method, sim.Policy, error) {
	err := errors.Join(m.validate(), inRange("chain", m.Chain, 0, m.Candidates),
		inRange("age", m.Age, 0, time.Hour), inRange("spare", m.Spare, 0, mostServers),
		oneOf("report-others", m.ReportOthers, "", ReportAll, ReportFirst, ReportNone))
	if !m.Reports {
		for name, given := range map[string]bool{
			"spare": m.Spare > 0, "report-others": m.ReportOthers != "", "coded": m.Coded,
		} {
			if given {
				err = errors.Join(err, errors.New(name+": with reports only"))
			}
		}
	}
	return m, leastPolicy{m.IgnoreIdle}, err
}

// New implements sim.Method. Without Reports, the candidates keep the order in which Hunt lists
// them.
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
		chained: p, b: b, age: m.Age.Seconds(), others: m.others(), coded: m.Coded,
		ignoresIdle: m.IgnoreIdle,
		last:        make([]report, len(b.Servers)), spare: accept.NewSpare(m.Spare),
	}, nil
}

// others returns the number of candidates whose loads a signal may carry in addition to that of its
// sender. They are the first in the list.
func (m *Least) others() int32 {
	switch m.ReportOthers {
	case ReportNone:
		return 0
	case ReportFirst:
		return 1
	}
	return sim.MaxChain
}

// chained offers a flow to the first of its candidates, up to Chain.
type chained struct {
	sim.Placement
	chain int32
}

func (p *chained) Place(f *sim.Flow, offer *sim.Offer) {
	p.Placement.Place(f, offer)
	offer.N = min(offer.N, p.chain)
}

// Recover returns all candidates of the flow's bucket. If candidates are random, it returns none.
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

// reported orders the candidates by the load in their last report.
type reported struct {
	*chained
	b      *sim.Balancer
	age    float64
	others int32 // number of candidates whose loads a signal may carry (see Least.others)
	coded  bool
	// ignoresIdle is Least.IgnoreIdle.
	ignoresIdle bool
	last        []report
	mean        float64 // mean of the reports; recent ones count for more
	spare       *accept.Spare
	rank        [sim.MaxChain]candidate
}

// report is the last report of a server.
type report struct {
	load float64 // (open flows + 1) / processors
	when float64
}

type candidate struct {
	server int32
	load   float64 // estimate of the present load
}

// meanGain is the share by which a report moves the mean of all reports.
const meanGain = 0.01

// Place orders all candidates by their estimated loads, and offers the flow to the first of them,
// up to Chain. A spare server can then get the last place.
func (p *reported) Place(f *sim.Flow, offer *sim.Offer) {
	clear(offer.Loads[:]) // by CPUs = 0, Accepted recognises servers that wrote no load
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

// offerSpare puts a spare server in the last place of the list: of the spare servers that are not
// in the list, the one that reported last. It may be outside the bucket. If the list is full, it
// replaces the last candidate. Without such a server, the list stays as it is.
func (p *reported) offerSpare(offer *sim.Offer) {
	s, ok := p.spare.Newest(offer.Servers[:offer.N])
	if !ok {
		return
	}
	offer.N = min(offer.N, p.chain-1)
	offer.Add(s)
}

// load estimates the present load of a server from its last report. With time, the estimate
// approaches the mean of all reports.
func (p *reported) load(server int32) float64 {
	last := p.last[server]
	if p.age == 0 {
		return last.load
	}
	return p.mean + (last.load-p.mean)*math.Exp((last.when-p.b.Now())/p.age)
}

// report stores a load that a server reported.
func (p *reported) report(server int32, load *sim.Load) {
	if p.ignoresIdle { // counts no connections that are answered and kept open
		load.Open, load.Idle = load.Open-load.Idle, 0
	}
	exact := acceptLoad(*load, uint32(load.CPUs))
	now := report{float64(load.Open+1) / float64(load.CPUs), p.b.Now()}
	if p.coded {
		now.load = float64(accept.Value(accept.Code(exact))) / accept.ValueOfOne
	}
	p.last[server] = now
	if p.live(server) { // a draining server would report ever lower loads
		p.spare.Report(server, exact)
	}
	p.mean += meanGain * (now.load - p.mean)
}

// Accepted reads the loads in a create-stickiness signal: that of the server that took the flow,
// and those of servers that passed it on. A signal with all loads also has the load that the taker
// had before the flow. That load counts in the mean of the reports.
func (p *reported) Accepted(f *sim.Flow, offer *sim.Offer, taker sim.Load) {
	for i := range min(offer.N, p.others) {
		isCarried := offer.Servers[i] != f.Server || p.others == sim.MaxChain
		if isCarried && offer.Loads[i].CPUs > 0 {
			p.report(offer.Servers[i], &offer.Loads[i])
		}
	}
	p.report(f.Server, &taker)
}

// Closed reads the load in a remove-stickiness signal.
func (p *reported) Closed(f *sim.Flow, end sim.End) {
	if end.Load.CPUs > 0 {
		p.report(f.Server, &end.Load)
	}
}

// MembershipChanged removes servers that are not live from the spare servers. It keeps their last
// reports.
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

// place returns where in its list an offer is.
func place(offer *sim.Offer) accept.Place {
	switch {
	case offer.Last():
		return accept.Last
	case offer.At == 0:
		return accept.First
	}
	return accept.Middle
}

// leastPolicy is the policy accept.Least.
type leastPolicy struct{ ignoresIdle bool }

// New implements sim.Policy.
func (p leastPolicy) New(*sim.Host) (sim.Agent, error) {
	return &leastAgent{ignoresIdle: p.ignoresIdle}, nil
}

type leastAgent struct {
	ignoresIdle bool
	passed      [sim.MaxChain]accept.Load
}

// Decide asks accept.Least, and returns the answer as an index in the list. If the agent ignores
// idle connections, later servers also see the load without them.
func (a *leastAgent) Decide(own sim.Load, offer *sim.Offer) int32 {
	if a.ignoresIdle {
		own.Open, own.Idle = own.Open-own.Idle, 0
		offer.Loads[offer.At] = own
	}
	for i := range offer.At {
		a.passed[i] = acceptLoad(offer.Loads[i], uint32(offer.Loads[i].CPUs))
	}
	answer, back := accept.Least(
		acceptLoad(own, uint32(own.CPUs)), a.passed[:offer.At], place(offer),
	)
	switch answer {
	case accept.Take:
		return offer.At
	case accept.Return:
		return int32(back)
	}
	return offer.At + 1
}
