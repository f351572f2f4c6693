// SPDX-License-Identifier: Apache-2.0

package sim

import "slices"

// change applies an event of the configuration. The servers change at once, and balancers detect
// that later. A change of the balancers or of a speed needs no detection.
func (e *engine) change(event *Event, index int32) {
	e.measureAll()
	switch event.Kind {
	case SetSpeed:
		for _, s := range event.Servers {
			e.setSpeed(&e.stations[s], event.Speed)
		}
	case ServerAdd, ServerFail, ApplicationFail, ServerDrain:
		for _, s := range event.Servers {
			e.changeServer(s, event.Kind)
			e.changes[s] = index
		}
		e.queue.push(e.now+event.Detect, detection, index)
	case BalancerAdd, BalancerFail:
		e.changeBalancers(event)
	}
}

// changeServer applies the part of an event that does not wait for the detection. A drain has no
// such part.
func (e *engine) changeServer(s int32, kind EventKind) {
	switch kind {
	case ServerAdd:
		e.servers[s].alive, e.servers[s].passesOn = true, false
	case ServerFail, ApplicationFail:
		e.failServer(s)
		e.servers[s].passesOn = kind == ApplicationFail
	}
}

// setSpeed changes the speed of a station. The new speed applies to the remaining work.
func (e *engine) setSpeed(st *station, speed float64) {
	if st.sharing != nil {
		st.sharing.SetSpeed(e.now, speed)
		st.speed = speed
		e.schedule(st)
		return
	}
	for slot := st.slot; slot < st.slot+st.cpus; slot++ {
		if e.slots[slot].flow != none {
			e.services.Set(slot, e.now+(e.services.Key(slot)-e.now)*st.speed/speed)
		}
	}
	st.speed = speed
}

// failServer ends all flows of a server that has failed. A flow whose response is outstanding is
// broken. An idle flow has its response already, so it keeps its outcome.
func (e *engine) failServer(s int32) {
	server := &e.servers[s]
	server.alive = false
	server.active, server.waiting = 0, newFlowList()
	e.clear(&e.stations[s])
	if e.config.usesIO() {
		e.clear(&e.stations[s+int32(len(e.servers))])
	}
	for f := range int32(len(e.flows)) {
		flow := &e.flows[f]
		if flow.Server != s {
			continue
		}
		e.hold(f)
		switch flow.phase {
		case underWay:
			e.leave(f, Broken)
		case idling:
			e.endIdle(f)
		}
		e.release(f)
	}
}

// clear removes all flows of a station.
func (e *engine) clear(st *station) {
	st.waiting, st.busy = newFlowList(), 0
	slots := st.cpus
	if st.sharing != nil {
		st.sharing.Clear()
		slots = 1
	}
	for slot := st.slot; slot < st.slot+slots; slot++ {
		e.slots[slot].flow = none
		e.services.Set(slot, never)
	}
}

// detect tells balancers that the servers of an event were added, drained or have failed. It
// ignores a server that has changed again since the event. Balancers learn of that server's state
// when they detect the later change.
func (e *engine) detect(event *Event, index int32) {
	e.meter.advance(e.now, len(e.live))
	for _, s := range event.Servers {
		if e.changes[s] == index {
			e.servers[s].live = event.Kind == ServerAdd
		}
	}
	e.live = make([]int32, 0, len(e.servers))
	for s := range e.servers {
		if e.servers[s].live {
			e.live = append(e.live, int32(s))
		}
	}
	e.sumLive()
	e.tellMembership()
}

// tellMembership tells all placements that the servers or balancers have changed.
func (e *engine) tellMembership() {
	for i := range e.balancers {
		b := &e.balancers[i]
		b.view.Live, b.view.Peers = e.live, e.peers
		if b.alive && b.member != nil {
			b.member.MembershipChanged()
		}
	}
}

// changeBalancers adds or fails balancers, and moves the flows that the edge router now sends to
// other balancers.
func (e *engine) changeBalancers(event *Event) {
	for _, i := range event.Balancers {
		if e.balancers[i].alive == (event.Kind == BalancerAdd) { // the event changes nothing
			continue
		}
		if event.Kind == BalancerFail {
			e.balancers[i].alive = false
			e.peers = slices.DeleteFunc(slices.Clone(e.peers), func(p int32) bool { return p == i })
			continue
		}
		e.peers = append(slices.Clone(e.peers), i)
		slices.Sort(e.peers)
		if err := e.startBalancer(i); err != nil {
			panic("sim: " + err.Error()) // earlier placements of the same method had no error
		}
	}
	e.tellMembership()
	for f := range int32(len(e.flows)) {
		if flow := &e.flows[f]; flow.phase != unused && flow.phase != forgotten {
			if to := e.edgeChoice(flow.Key); to != int32(flow.balancer) {
				e.hold(f)
				e.move(f, to)
				e.release(f)
			}
		}
	}
}

// move sends the packets of a flow to another balancer from now on, or to none if to is none. What
// becomes of the flow depends on its state:
//   - It has ended: it is forgotten.
//   - It is idle: it ends, unless the new balancer recovers it.
//   - No server has taken it: it is lost if its old balancer tracks it, because its SYN is then
//     between balancer and servers. Otherwise it goes on.
//   - A server has taken it: it is lost, unless the new balancer recovers it.
func (e *engine) move(f, to int32) {
	flow := &e.flows[f]
	if from := &e.balancers[flow.balancer]; flow.tracked && from.alive {
		from.unclaim(flow.Key)
		if from.closer != nil {
			e.tellClosed(from, f, Load{})
		}
	}
	wasTracked := flow.tracked
	flow.tracked, flow.Mark = false, 0
	if to != none {
		flow.balancer = int16(to)
	}
	switch {
	case flow.phase == ended: // the balancers have nothing more to do for the flow
		e.forget(f)
	case flow.phase == idling: // the connection ends unless the balancer finds it
		if to == none || !e.recover(f) {
			e.endIdle(f)
		}
	case flow.Server == none:
		if wasTracked {
			e.end(f, Lost)
		}
	case !flow.lost:
		flow.lost = to == none || !e.recover(f)
	}
}

// recover tells whether the new balancer of a flow finds the flow's server. If so, the flow goes
// on. If the flow table has room, the balancer also tracks the flow, and its placement learns the
// server.
func (e *engine) recover(f int32) bool {
	flow := &e.flows[f]
	b := &e.balancers[flow.balancer]
	if b.recoverer == nil {
		return false
	}
	var list Offer
	b.recoverer.Recover(&flow.Flow, &list)
	if !slices.Contains(list.Servers[:list.N], flow.Server) {
		return false
	}
	e.result.Recovered++
	if m := e.series.of(flow.sent); m != nil {
		m.Recovered++
	}
	if flow.tracked = b.claim(flow.Key); !flow.tracked {
		return true
	}
	if b.accepter != nil {
		b.accepter.Accepted(&flow.Flow, &list, e.load(flow.Server))
	}
	if flow.connected <= e.now && b.connecter != nil {
		flow.Connected = true
		b.connecter.Connected(&flow.Flow)
	}
	return true
}
