// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"math"
)

// balancer is the state of a balancer.
type balancer struct {
	alive     bool
	weight    float64
	salt      uint64 // the edge router hashes a flow with it, differently for each balancer
	view      Balancer
	placement Placement
	// The optional interfaces of the placement. Those that it does not have are nil.
	accepter  Accepter
	connecter Connecter
	closer    Closer
	silencer  Silencer
	stepper   Stepper
	prober    Prober
	member    Member
	fallback  Fallback
	recoverer Recoverer
	// Number of entries in use in each bucket of the flow table; nil if the table has no limit.
	entries  []uint16
	ways     uint16  // entries of a bucket
	flows    uint64  // measured flows so far
	nextStep float64 // time of the next step of the placement
}

// begin creates the balancer's placement, and finds out which optional interfaces it has.
func (b *balancer) begin(m Method) error {
	p, err := m.New(&b.view)
	if err != nil {
		return fmt.Errorf("balancer %d: %w", b.view.Index, err)
	}
	b.placement = p
	b.accepter, _ = p.(Accepter)
	b.connecter, _ = p.(Connecter)
	b.closer, _ = p.(Closer)
	b.silencer, _ = p.(Silencer)
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

// ignoresEnds tells whether the end of a flow changes nothing for the balancer.
func (b *balancer) ignoresEnds() bool { return b.closer == nil && b.entries == nil }

// bucket returns a pointer to the number of entries in use in a flow's bucket.
func (b *balancer) bucket(key uint64) *uint16 { return &b.entries[scale(key, len(b.entries))] }

// claim takes an entry of the flow table. It returns false if the flow's bucket has none free.
func (b *balancer) claim(key uint64) bool {
	if b.entries == nil {
		return true
	}
	used := b.bucket(key)
	if *used == b.ways {
		return false
	}
	*used++
	return true
}

// unclaim frees the entry of a flow.
func (b *balancer) unclaim(key uint64) {
	if b.entries != nil {
		*b.bucket(key)--
	}
}

// edgeChoice returns the balancer to which the edge router sends a flow, or none if there is no
// balancer. It uses weighted rendezvous hashing, so a balancer that is added or removed moves no
// more flows than necessary.
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

// unequalChoice is edgeChoice for balancers of different weights. For each balancer, it draws an
// exponential time from the flow's hash, and divides it by the weight. The balancer with the
// shortest time gets the flow. So shares are in proportion to the weights.
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

// place handles the SYN of a new flow that arrives at the balancer. The placement makes the offer.
// If the flow table has no room for the flow, the placement's Fallback makes the offer, or ECMP if
// the placement has no Fallback. A flow without an offer is lost.
func (e *engine) place(f int32) {
	flow := &e.flows[f]
	if flow.phase != underWay {
		return
	}
	b := &e.balancers[flow.balancer]
	if !b.alive { // no balancer is left; otherwise move would have chosen one
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

// offered handles an offer that arrives at a server. The server's agent takes the flow or passes it
// to another candidate. A server without an agent takes the flow, and so does a server to which
// another one has sent it back.
func (e *engine) offered(f int32) {
	flow := &e.flows[f]
	if flow.phase != underWay {
		return
	}
	offer := &e.transits[flow.transit].Offer
	s := offer.Servers[offer.At]
	if !e.servers[s].alive {
		e.offeredToDead(f, s)
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
	e.passOn(f, next)
}

// passOn sends an offer to the candidate with the index next in the list.
func (e *engine) passOn(f, next int32) {
	flow := &e.flows[f]
	offer := &e.transits[flow.transit].Offer
	flow.hops++
	flow.forced = next < offer.At // sent back: that server must take it
	offer.At = next
	e.send(e.delay(&e.config.Network.ServerServer, f), offerAtServer, f)
}

// fullLoad is the number of flows that a server whose application has failed reports to later
// candidates. It is more than any other server has.
const fullLoad = 1 << 30

// offeredToDead handles an offer to a server that has failed. If the whole server has failed, the
// flow is lost. If only its application has failed, the server passes the offer on to the next
// candidate, or refuses the flow if it cannot pass it on.
func (e *engine) offeredToDead(f, s int32) {
	flow := &e.flows[f]
	offer := &e.transits[flow.transit].Offer
	switch {
	case !e.servers[s].passesOn:
		e.end(f, Lost)
	case e.agentOf(s) == nil || flow.forced || offer.Last(): // the server cannot pass the flow on
		e.end(f, Refused)
	default:
		load := e.load(s)
		load.Open, load.Busy = fullLoad, fullLoad
		offer.Loads[offer.At] = load
		e.passOn(f, offer.At+1)
	}
}

// take lets a server take a flow. The server tells the balancer, and answers the client with a
// SYN-ACK. The client's acknowledgement and request then pass the balancer on their way to the
// server.
func (e *engine) take(f, s int32) {
	flow := &e.flows[f]
	b := &e.balancers[flow.balancer]
	e.touch(s)
	e.countTaken(flow, &e.transits[flow.transit].Offer, s)
	flow.others = uint8(min(e.servers[s].open, math.MaxUint8))
	e.changeOpen(s, 1)
	flow.Server = s
	n := &e.config.Network
	if flow.tracked && b.accepter != nil {
		e.transits[flow.transit].taker = e.load(s)
		e.send(e.delay(&n.BalancerServer, f), acceptedAtBalancer, f)
	} else { // the balancer ignores the signal, so the SYN was the transit's last packet
		e.arrived(f)
	}
	back := e.delay(&n.ServerClient, f) + e.delay(&n.ClientBalancer, f)
	flow.connected = e.now + back
	if flow.tracked && b.connecter != nil {
		e.send(back, connectedAtBalancer, f)
		return
	}
	// The balancer ignores the acknowledgement, so there is no event for it.
	e.send(back+e.delay(&n.BalancerServer, f), requestAtServer, f)
}

// acceptedAt handles a server's signal that arrives at the balancer.
func (e *engine) acceptedAt(f int32) {
	flow := &e.flows[f]
	b := &e.balancers[flow.balancer]
	if flow.tracked && flow.phase != forgotten && b.accepter != nil {
		t := &e.transits[flow.transit]
		b.accepter.Accepted(&flow.Flow, &t.Offer, t.taker)
	}
	e.arrived(f)
}

// connect handles the client's first acknowledgement when it passes the balancer.
func (e *engine) connect(f int32) {
	flow := &e.flows[f]
	b := &e.balancers[flow.balancer]
	if flow.tracked && flow.phase != forgotten && b.connecter != nil {
		flow.Connected = true
		b.connecter.Connected(&flow.Flow)
	}
	e.send(e.delay(&e.config.Network.BalancerServer, f), requestAtServer, f)
}

// end handles the end of a flow, on its server or without one. The client and then the balancer
// learn it later.
func (e *engine) end(f int32, outcome Outcome) {
	flow := &e.flows[f]
	flow.phase = ended
	back := 0.0
	switch {
	case flow.Server != none:
		back = e.delay(&e.config.Network.ServerClient, f)
	case flow.transit != none:
		e.arrived(f) // no server has the flow
	}
	e.tellEnd(f, e.respond(f, outcome, back))
}

// respond counts the end of a flow. The client learns of it after the delay back. The flow counts
// as Broken if the client no longer reached the server, and as TimedOut if the response comes after
// the timeout. respond returns the delay after which the client closes the flow: back, or the rest
// of the timeout if the flow has timed out and the rest is longer.
func (e *engine) respond(f int32, outcome Outcome, back float64) float64 {
	flow := &e.flows[f]
	response := e.now + back - flow.sent
	limit := e.config.Timeout
	switch {
	case flow.lost: // the client no longer reached the server; what the server did does not count
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
	return back
}

// tellEnd lets the client close an ended flow after the delay back. The balancer learns of the end
// when the client's last packet passes. If the end changes nothing for the balancer, tellEnd
// forgets the flow at once.
func (e *engine) tellEnd(f int32, back float64) {
	flow := &e.flows[f]
	if !flow.tracked || e.balancers[flow.balancer].ignoresEnds() {
		e.forget(f)
		return
	}
	t := e.depart(f)
	t.leaving = Load{}
	if s := flow.Server; s != none && e.servers[s].alive {
		t.leaving = e.load(s)
	}
	e.send(back+e.delay(&e.config.Network.ClientBalancer, f), closedAtBalancer, f)
}

// fallIdle handles the end of a response after which the client keeps the connection open for the
// time idle. A client that has given up, or no longer reaches the server, closes the connection at
// once. If the idle time is long enough, the placement learns later that the flow is silent.
func (e *engine) fallIdle(f int32, idle float64) {
	flow := &e.flows[f]
	back := e.respond(f, Completed, e.delay(&e.config.Network.ServerClient, f))
	e.observe(flow)
	if flow.outcome != Completed {
		idle = 0
	}
	flow.phase = idling
	e.servers[flow.Server].idle++
	b := &e.balancers[flow.balancer]
	if b.silencer != nil && flow.tracked && idle > b.silencer.SilentAfter() {
		e.send(back+b.silencer.SilentAfter(), silentAtBalancer, f)
	}
	e.send(back+idle, idleEnds, f)
}

// silent tells the balancer that a flow is silent.
func (e *engine) silent(f int32) {
	flow := &e.flows[f]
	if b := &e.balancers[flow.balancer]; flow.phase == idling && flow.tracked && b.silencer != nil {
		b.silencer.Silent(&flow.Flow)
	}
}

// endIdle closes the connection of a flow that was idle.
func (e *engine) endIdle(f int32) {
	flow := &e.flows[f]
	if flow.phase != idling {
		return // the flow has ended before, because its server or its balancer failed
	}
	flow.phase = ended
	e.touch(flow.Server)
	e.servers[flow.Server].idle--
	e.changeOpen(flow.Server, -1)
	e.tellEnd(f, 0)
}

// close handles the last packet of a flow when it passes the balancer: it frees the flow's entry
// and tells the placement. If the flow has moved to a balancer that does not track it, close does
// neither.
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

// tellClosed calls Closed of the placement. It also sets Connected, which connect does only for a
// Connecter.
func (e *engine) tellClosed(b *balancer, f int32, load Load) {
	flow := &e.flows[f]
	end := End{Outcome: flow.outcome, Load: load}
	if flow.Server != none && flow.connected <= e.now {
		flow.Connected = true
		end.Duration = e.now - flow.connected
	}
	b.closer.Closed(&flow.Flow, end)
}

// forget marks a flow as forgotten: it no longer counts as under way. Its memory is free after the
// last release.
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

// step does the periodic work of a placement.
func (e *engine) step(i int32) {
	b := &e.balancers[i]
	// The event of a balancer that has failed does nothing. If the balancer was added again since
	// then, it has scheduled another event, at nextStep.
	if b.alive && e.now == b.nextStep {
		b.stepper.Step()
		e.scheduleStep(i)
	}
}

func (e *engine) scheduleStep(i int32) {
	b := &e.balancers[i]
	b.nextStep = e.now + b.stepper.Interval()
	e.queue.push(b.nextStep, step, i)
}

// probe is a request for a server's load, and the answer.
type probe struct {
	balancer, server int32
	load             Load
}

// probe sends a probe from a balancer to a server.
func (e *engine) probe(balancer int, server int32) {
	p := probe{balancer: int32(balancer), server: server}
	i := int32(len(e.probes))
	if n := len(e.idleProbes); n > 0 {
		i = e.idleProbes[n-1]
		e.idleProbes = e.idleProbes[:n-1]
		e.probes[i] = p
	} else {
		e.probes = append(e.probes, p)
	}
	e.queue.push(e.now+e.probeDelay(), probeAtServer, i)
}

func (e *engine) probeDelay() float64 {
	return e.config.Network.BalancerServer.Sample(e.probeDraws.Uint64())
}

// probed handles a probe that arrives at a server.
func (e *engine) probed(i int32) {
	p := &e.probes[i]
	if !e.servers[p.server].alive { // the probe is lost
		e.idleProbes = append(e.idleProbes, i)
		return
	}
	p.load = e.load(p.server)
	e.queue.push(e.now+e.probeDelay(), probeAtBalancer, i)
}

// answered handles the answer to a probe when it arrives at the balancer.
func (e *engine) answered(i int32) {
	p := e.probes[i]
	e.idleProbes = append(e.idleProbes, i)
	if b := &e.balancers[p.balancer]; b.alive && b.prober != nil {
		b.prober.Probed(p.server, p.load)
	}
}
