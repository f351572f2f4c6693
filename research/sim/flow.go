// SPDX-License-Identifier: Apache-2.0

package sim

import "math"

// flow is a flow under way: what balancers see of it, and the rest. It fills only one cache
// line, because with many servers a flow has left the cache before its next event.
type flow struct {
	Flow
	sent      float64 // time of the client's SYN
	connected float64 // time at which the first acknowledgement passed the balancer
	next      int32   // next flow in the list that contains this flow: a queue, or the free flows
	balancer  int16
	draws     uint8 // number of random numbers drawn for the flow
	pending   uint8 // calls of hold without release: its future events, and calls under way
	stage     uint8
	hops      uint8
	outcome   Outcome
	phase     phase
	tracked   bool // has an entry in the flow table
	measured  bool
	forced    bool // a server has sent it back
	lost      bool // the balancer has lost it: its packets do not find the server any more
}

// phase is the progress of a flow.
type phase uint8

const (
	unused    phase = iota // the memory is free
	underWay               // on its way to a server, or on a server
	idling                 // answered; its client keeps it open
	ended                  // left its server, or reached none
	forgotten              // its balancer has seen the end
)

// transit is the content of a flow's packets that are under way: the list of servers in a SYN, and
// the loads of servers. It is separate from the flow, because few flows need one at a time.
type transit struct {
	Offer
	taker   Load  // load of the server that took the flow, at that time
	leaving Load  // load of the server that the flow left, at that time
	packets int32 // packets under way that use the transit
}

const none = -1

// draw returns random bits for the flow.
func (f *flow) draw() uint64 {
	f.draws++
	return mix(f.Key + uint64(f.draws)*golden)
}

// stageDraw returns the random bits that determine the work of a flow's stage. They are
// independent of those of draw, so the work is the same however the flow came to its server.
func stageDraw(key uint64, stage uint8) uint64 { return mix(key - uint64(stage+1)*golden) }

// idleDraw is the argument of stageDraw for the time that a flow is idle. No stage has this number.
const idleDraw = math.MaxUint8

// flowList is a queue of flows, linked through flow.next.
type flowList struct{ head, tail, n int32 }

func newFlowList() flowList { return flowList{head: none, tail: none} }

// append puts a flow at the end of a list.
func (e *engine) append(l *flowList, f int32) {
	e.flows[f].next = none
	if l.n == 0 {
		l.head = f
	} else {
		e.flows[l.tail].next = f
	}
	l.tail = f
	l.n++
}

// takeFirst removes the first flow of a list, which must not be empty.
func (e *engine) takeFirst(l *flowList) int32 {
	f := l.head
	l.head = e.flows[f].next
	l.n--
	return f
}

// newFlow returns memory for a flow. It reuses the memory of ended flows.
func (e *engine) newFlow() int32 {
	f := e.free
	if f == none {
		e.flows = append(e.flows, flow{})
		return int32(len(e.flows) - 1)
	}
	e.free = e.flows[f].next
	return f
}

// hold keeps a flow's memory until release has been called as often as hold.
func (e *engine) hold(f int32) { e.flows[f].pending++ }

// release undoes one hold. The last release of a forgotten flow frees its memory.
func (e *engine) release(f int32) {
	flow := &e.flows[f]
	flow.pending--
	if flow.pending == 0 && flow.phase == forgotten {
		flow.phase = unused
		flow.next = e.free
		e.free = f
	}
}

// depart returns the flow's transit for a packet that leaves now. The flow gets one if it has none.
func (e *engine) depart(f int32) *transit {
	flow := &e.flows[f]
	if flow.transit == none {
		n := len(e.idleTransits)
		if n == 0 {
			e.idleTransits = append(e.idleTransits, int32(len(e.transits)))
			e.transits = append(e.transits, transit{})
			n++
		}
		flow.transit = e.idleTransits[n-1]
		e.idleTransits = e.idleTransits[:n-1]
	}
	t := &e.transits[flow.transit]
	t.packets++
	return t
}

// arrived notes that a packet with the flow's transit has arrived. The arrival of the last packet
// under way frees the transit.
func (e *engine) arrived(f int32) {
	flow := &e.flows[f]
	t := &e.transits[flow.transit]
	if t.packets--; t.packets == 0 {
		e.idleTransits = append(e.idleTransits, flow.transit)
		flow.transit = none
	}
}
