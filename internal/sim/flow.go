package sim

// flow is a flow under way: what balancers see of it, and the rest.
type flow struct {
	Flow
	sent      float64 // the client's SYN
	connected float64 // its first acknowledgement, at the balancer
	taken     float64 // by the server
	work      float64 // of the stage that it is in or waits for
	next      int32   // in the queue that it is in, or among free flows
	balancer  int32
	draws     uint16 // random numbers drawn for it
	pending   uint16 // events that are to come
	stage     uint8
	hops      uint8
	outcome   Outcome
	tracked   bool // has an entry in the flow table
	measured  bool
	forced    bool // has been handed back
	lost      bool // to its balancer: its packets do not find the server any more
	ended     bool // on its server, or before it came to one
	done      bool // the balancer has seen its end
	lives     bool // is under way, not free memory
}

// report is what servers say of themselves in a flow's signals.
type report struct {
	taker   Load // that took it, then
	leaving Load // that it left, then
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
		e.offers = append(e.offers, Offer{})
		e.reports = append(e.reports, report{})
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
	if flow.pending == 0 && flow.done {
		flow.lives = false
		flow.next = e.free
		e.free = f
	}
}
