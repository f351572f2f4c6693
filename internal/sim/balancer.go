// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"math"
)

// balancer is a balancer's state. What its placement wants to know is found out once.
type balancer struct {
	alive     bool
	weight    float64
	salt      uint64 // makes the edge router's hash the balancer's own
	view      Balancer
	placement Placement
	accepter  Accepter
	connecter Connecter
	closer    Closer
	stepper   Stepper
	prober    Prober
	member    Member
	fallback  Fallback
	recoverer Recoverer
	entries   []uint16 // taken in each bucket of the flow table; none if that has no limit
	ways      uint16
	flows     uint64
	nextStep  float64
}

// begin makes the balancer's placement.
func (b *balancer) begin(m Method) error {
	p, err := m.New(&b.view)
	if err != nil {
		return fmt.Errorf("balancer %d: %w", b.view.Index, err)
	}
	b.placement = p
	b.accepter, _ = p.(Accepter)
	b.connecter, _ = p.(Connecter)
	b.closer, _ = p.(Closer)
	b.stepper, _ = p.(Stepper)
	b.prober, _ = p.(Prober)
	b.member, _ = p.(Member)
	b.fallback, _ = p.(Fallback)
	b.recoverer, _ = p.(Recoverer)
	if b.stepper != nil && b.stepper.Interval() <= 0 {
		return fmt.Errorf("balancer %d: an interval of %v s: must be positive", b.view.Index, b.stepper.Interval())
	}
	return nil
}

// ignorant tells whether the end of a flow changes nothing for the balancer.
func (b *balancer) ignorant() bool { return b.closer == nil && b.entries == nil }

// claim takes an entry of the flow table, if there is one.
func (b *balancer) claim(key uint64) bool {
	if b.entries == nil {
		return true
	}
	bucket := &b.entries[key>>32*uint64(len(b.entries))>>32]
	if *bucket == b.ways {
		return false
	}
	*bucket++
	return true
}

// unclaim gives it back.
func (b *balancer) unclaim(key uint64) {
	if b.entries != nil {
		b.entries[key>>32*uint64(len(b.entries))>>32]--
	}
}

// edgeChoice is the balancer that the edge router sends a flow to: by weighted rendezvous hashing, so
// that a balancer that comes or goes moves no more flows than it must. It is none if there is no
// balancer.
func (e *engine) edgeChoice(key uint64) int32 {
	if len(e.peers) == 1 {
		return e.peers[0]
	}
	if e.unequal {
		return e.unequalChoice(key)
	}
	best, choice := uint64(math.MaxUint64), int32(none)
	for _, i := range e.peers {
		if score := (key ^ e.balancers[i].salt) * golden; score < best {
			best, choice = score, i
		}
	}
	return choice
}

func (e *engine) unequalChoice(key uint64) int32 {
	best, choice := never, int32(none)
	for _, i := range e.peers {
		b := &e.balancers[i]
		if score := exponential((key^b.salt)*golden) / b.weight; score < best {
			best, choice = score, i
		}
	}
	return choice
}

// place has a balancer offer a new flow, whose SYN has come.
func (e *engine) place(f int32) {
	flow := &e.flows[f]
	if flow.phase != underWay {
		return
	}
	b := &e.balancers[flow.balancer]
	if !b.alive { // and no other is
		e.end(f, Lost)
		return
	}
	offer := &e.depart(f).Offer
	offer.N, offer.At = 0, 0
	flow.tracked = b.claim(flow.Key)
	if flow.measured {
		b.flows++
	}
	switch {
	case flow.tracked:
		b.placement.Place(&flow.Flow, offer)
	case b.fallback != nil:
		b.fallback.Untracked(&flow.Flow, offer)
	default:
		if s := b.view.ECMP(&flow.Flow); s != none {
			offer.Set(s)
		}
	}
	if !flow.tracked {
		e.count(flow, func(m *Measures) { m.Untracked++ })
	}
	if offer.N == 0 {
		e.end(f, Lost)
		return
	}
	e.send(e.delay(&e.config.Network.BalancerServer, f), offerAtServer, f)
}

// offered is when an offer comes to a server.
func (e *engine) offered(f int32) {
	flow := &e.flows[f]
	if flow.phase != underWay {
		return
	}
	offer := &e.transits[flow.transit].Offer
	s := offer.Servers[offer.At]
	if !e.servers[s].alive {
		e.end(f, Lost)
		return
	}
	agent := e.agentOf(s)
	if agent == nil || flow.forced {
		e.take(f, s)
		return
	}
	own := e.load(s)
	offer.Loads[offer.At] = own
	next := agent.Decide(own, offer)
	if next == offer.At {
		e.take(f, s)
		return
	}
	if next < 0 || next >= offer.N {
		panic(fmt.Sprintf("sim: an agent passed a flow to candidate %d of %d", next, offer.N))
	}
	flow.hops++
	flow.forced = next < offer.At
	offer.At = next
	e.send(e.delay(&e.config.Network.ServerServer, f), offerAtServer, f)
}

// take has a server take a flow.
func (e *engine) take(f, s int32) {
	flow := &e.flows[f]
	b := &e.balancers[flow.balancer]
	e.touch(s)
	e.countTaken(flow, &e.transits[flow.transit].Offer, s)
	flow.found = uint8(min(e.servers[s].open, math.MaxUint8))
	e.opened(s, 1)
	flow.Server = s
	n := &e.config.Network
	if flow.tracked && b.accepter != nil {
		e.transits[flow.transit].taker = e.load(s)
		e.send(e.delay(&n.BalancerServer, f), acceptedAtBalancer, f)
	} else {
		e.arrived(f)
	}
	back := e.delay(&n.ServerClient, f) + e.delay(&n.ClientBalancer, f)
	flow.connected = e.now + back
	if flow.tracked && b.connecter != nil {
		e.send(back, connectedAtBalancer, f)
		return
	}
	e.send(back+e.delay(&n.BalancerServer, f), requestAtServer, f)
}

// acceptedAt is when the server's signal comes to the balancer.
func (e *engine) acceptedAt(f int32) {
	flow := &e.flows[f]
	b := &e.balancers[flow.balancer]
	if flow.tracked && flow.phase != forgotten && b.accepter != nil {
		t := &e.transits[flow.transit]
		b.accepter.Accepted(&flow.Flow, &t.Offer, t.taker)
	}
	e.arrived(f)
}

// connect is when the client's acknowledgement passes the balancer.
func (e *engine) connect(f int32) {
	flow := &e.flows[f]
	b := &e.balancers[flow.balancer]
	if flow.tracked && flow.phase != forgotten && b.connecter != nil {
		flow.Connected = true
		b.connecter.Connected(&flow.Flow)
	}
	e.send(e.delay(&e.config.Network.BalancerServer, f), requestAtServer, f)
}

// end is when a flow ends, on its server or without one; the client and then the balancer learn later.
func (e *engine) end(f int32, outcome Outcome) {
	flow := &e.flows[f]
	n := &e.config.Network
	flow.phase = ended
	back := 0.0
	switch {
	case flow.Server != none:
		back = e.delay(&n.ServerClient, f)
	case flow.transit != none:
		e.arrived(f) // nowhere
	}
	response := e.now + back - flow.sent
	limit := e.config.Timeout
	switch {
	case flow.lost: // before, whatever its server made of it
		outcome = Broken
	case limit > 0 && outcome == Completed && response > limit:
		outcome = TimedOut
	}
	if outcome == TimedOut {
		back = max(back, flow.sent+limit-e.now)
		response = limit
	}
	flow.outcome = outcome
	e.countEnd(flow, response)
	if !flow.tracked || e.balancers[flow.balancer].ignorant() {
		e.forget(f)
		return
	}
	t := e.depart(f)
	t.leaving = Load{}
	if s := flow.Server; s != none && e.servers[s].alive {
		t.leaving = e.load(s)
	}
	e.send(back+e.delay(&n.ClientBalancer, f), closedAtBalancer, f)
}

// close is when the balancer sees a flow's end.
func (e *engine) close(f int32) {
	flow := &e.flows[f]
	if b := &e.balancers[flow.balancer]; flow.tracked && flow.phase != forgotten {
		b.unclaim(flow.Key)
		if b.closer != nil {
			e.tellClosed(b, f, e.transits[flow.transit].leaving)
		}
	}
	e.arrived(f)
	e.forget(f)
}

// tellClosed calls Closed.
func (e *engine) tellClosed(b *balancer, f int32, load Load) {
	flow := &e.flows[f]
	end := End{Outcome: flow.outcome, Load: load}
	if flow.Server != none && flow.connected <= e.now {
		flow.Connected = true
		end.Duration = e.now - flow.connected
	}
	b.closer.Closed(&flow.Flow, end)
}

// forget ends a flow's life.
func (e *engine) forget(f int32) {
	flow := &e.flows[f]
	if flow.phase != forgotten {
		flow.phase = forgotten
		e.result.underWay--
		if e.sizes != nil {
			delete(e.sizes, flow.Number)
		}
	}
}

// step is when a placement's periodic work is due.
func (e *engine) step(i int32) {
	b := &e.balancers[i]
	if b.alive && e.now == b.nextStep { // else it was due before the balancer failed
		b.stepper.Step()
		e.scheduleStep(i)
	}
}

func (e *engine) scheduleStep(i int32) {
	b := &e.balancers[i]
	b.nextStep = e.now + b.stepper.Interval()
	e.queue.push(b.nextStep, step, i)
}

// probe is a question for a server's load, and the answer.
type probe struct {
	balancer, server int32
	load             Load
}

func (e *engine) probe(balancer int, server int32) {
	p := probe{balancer: int32(balancer), server: server}
	i := int32(len(e.probes))
	if n := len(e.idle); n > 0 {
		i = e.idle[n-1]
		e.idle = e.idle[:n-1]
		e.probes[i] = p
	} else {
		e.probes = append(e.probes, p)
	}
	e.queue.push(e.now+e.probeDelay(), probeAtServer, i)
}

func (e *engine) probeDelay() float64 {
	return e.config.Network.BalancerServer.sample(e.probeDraws.Uint64())
}

// probed is when a probe comes to a server.
func (e *engine) probed(i int32) {
	p := &e.probes[i]
	if !e.servers[p.server].alive {
		e.idle = append(e.idle, i)
		return
	}
	p.load = e.load(p.server)
	e.queue.push(e.now+e.probeDelay(), probeAtBalancer, i)
}

// answered is when the answer comes to the balancer.
func (e *engine) answered(i int32) {
	p := e.probes[i]
	e.idle = append(e.idle, i)
	if b := &e.balancers[p.balancer]; b.alive && b.prober != nil {
		b.prober.Probed(p.server, p.load)
	}
}
