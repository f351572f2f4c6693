// SPDX-License-Identifier: Apache-2.0

package sim

// flow is a flow under way: what balancers see of it, and the rest. It fills one line of the cache, for
// with many servers a flow has left the cache before its next event comes.
type flow struct {
	Flow
	sent      float64 // the client's SYN
	connected float64 // its first acknowledgement, at the balancer
	next      int32   // in the queue that it is in, or among free flows
	balancer  int16
	draws     uint8 // random numbers drawn for it
	pending   uint8 // events that are to come
	stage     uint8
	hops      uint8
	outcome   Outcome
	phase     phase
	tracked   bool // has an entry in the flow table
	measured  bool
	forced    bool // has been handed back
	lost      bool // to its balancer: its packets do not find the server any more
}

// phase is how far a flow has come.
type phase uint8

const (
	unused    phase = iota // memory for another flow
	underWay               // to a server, or on one
	ended                  // has left its server, or has not come to one
	forgotten              // its balancer has seen the end
)

// transit is what packets of a flow carry while they are on their way: a SYN's list of servers, and
// what servers say of themselves. It is apart from the flow, for there are few at a time.
type transit struct {
	Offer
	taker   Load // the server's that took the flow, then
	leaving Load // the server's that the flow left, then
	packets int32
}

const none = -1

// draw returns random bits of the flow's own.
func (f *flow) draw() uint64 {
	f.draws++
	return mix(f.Key + uint64(f.draws)*golden)
}

// stageDraw returns the random bits that decide on the work of a flow's stage, apart from those of
// draw: however a flow came to its server, its work is the same.
func stageDraw(key uint64, stage uint8) uint64 { return mix(key - uint64(stage+1)*golden) }

// flowList is a queue of flows, linked through flow.next.
type flowList struct{ head, tail, n int32 }

func newFlowList() flowList { return flowList{head: none, tail: none} }

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

// takeFirst removes the first flow of a list that is not empty.
func (e *engine) takeFirst(l *flowList) int32 {
	f := l.head
	l.head = e.flows[f].next
	l.n--
	return f
}

// newFlow returns a flow's memory, from those that have ended if there are any.
func (e *engine) newFlow() int32 {
	f := e.free
	if f == none {
		e.flows = append(e.flows, flow{})
		return int32(len(e.flows) - 1)
	}
	e.free = e.flows[f].next
	return f
}

// hold keeps a flow's memory until release is called as often.
func (e *engine) hold(f int32) { e.flows[f].pending++ }

func (e *engine) release(f int32) {
	flow := &e.flows[f]
	flow.pending--
	if flow.pending == 0 && flow.phase == forgotten {
		flow.phase = unused
		flow.next = e.free
		e.free = f
	}
}

// depart returns what a packet of the flow carries, until it arrives.
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

// arrived is when a packet needs not carry anything any more.
func (e *engine) arrived(f int32) {
	flow := &e.flows[f]
	t := &e.transits[flow.transit]
	if t.packets--; t.packets == 0 {
		e.idleTransits = append(e.idleTransits, flow.transit)
		flow.transit = none
	}
}
