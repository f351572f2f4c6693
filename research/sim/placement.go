// SPDX-License-Identifier: Apache-2.0

package sim

// MaxChain is the maximum number of servers to which a flow is offered.
const MaxChain = 8

// Flow is a connection as its balancer sees it. A placement may read it only during the call,
// because the memory is reused.
type Flow struct {
	// Key is the hash of the 5-tuple: 64 random bits, the same for all placements. Balancer.RowKey
	// selects rows of tables.
	Key uint64
	// Number is the number of the flow in the order of arrival, from 0.
	Number uint64
	// Server is the server of the flow, or -1 before a server has taken it.
	Server int32
	// Mark is for the placement, to store something about the flow. It is 0 when the flow comes to
	// a balancer.
	Mark uint32
	// transit is the index in engine.transits, or -1. It is here and not in type flow, because it
	// fits here without making Flow larger.
	transit int32
	// Class is the index of the flow's job in Config.Jobs. A layer-4 balancer does not know it.
	Class int16
	// Connected tells whether the first acknowledgement has passed the balancer (state CONN of
	// HLB).
	Connected bool
	// others is the number of other flows on the server when it took this one, at most 255. It is
	// here for the same reason as transit.
	others uint8
}

// Offer is the list of servers to which a new flow is offered in turn, like the segments of a SYN.
type Offer struct {
	// N is the length of the list, 1 to MaxChain.
	N int32
	// At is the index of the server at which the SYN is. It is 0 while the balancer places the
	// flow.
	At      int32
	Servers [MaxChain]int32
	// Loads are the loads that servers wrote when they passed the flow on. The loads of other
	// servers are not set.
	Loads [MaxChain]Load
}

// Set sets the list.
func (o *Offer) Set(servers ...int32) { o.N = int32(copy(o.Servers[:], servers)) }

// Add appends to the list, which must be shorter than MaxChain.
func (o *Offer) Add(server int32) {
	o.Servers[o.N] = server
	o.N++
}

// Last tells whether the SYN is at the last server of the list.
func (o *Offer) Last() bool { return o.At == o.N-1 }

// Load is the load that a server reports, at the time of the report.
type Load struct {
	Open    int32 // connections that the server has taken and that have not ended
	Idle    int32 // those that are answered and kept open by their clients
	Busy    int32 // those that are served at the moment
	Waiting int32 // those that wait in the backlog for a worker or processor
	// Workers is the number of connections that can be served at once: the processors with FIFO,
	// the worker limit with processor sharing. 0 means no limit.
	Workers int32
	CPUs    int32
	// Capacity is in units of a processor of speed 1.
	Capacity float64
	// Latency is an estimate of the server's agent in seconds (see Estimator), otherwise 0.
	Latency float64
}

// Method is a placement with its parameters. Runs that go on at the same time share it, so New
// must not change it.
type Method interface {
	// New returns the placement of one balancer in one run.
	New(*Balancer) (Placement, error)
}

// Placement decides on one balancer to which servers a new flow is offered. The engine calls it
// from one goroutine. A placement can also have methods of the interfaces below, to learn more.
//
// For every flow that was placed and has an entry in the flow table, Closed is called once: at the
// flow's end, or when the edge router moves the flow to another balancer. It is called even if no
// server took the flow or it was never connected. If the balancer itself has failed before, Closed
// is not called.
type Placement interface {
	// Place makes the offer, which is empty at first. The last server of the offer must take the
	// flow. A flow without an offer is lost.
	Place(f *Flow, offer *Offer)
}

// The optional interfaces of placements. A flow without an entry in a flow table of limited size
// is placed by Untracked, and the methods of the other interfaces are not called for it.
type (
	// Accepter learns from a create-stickiness signal that the server f.Server took a flow. The
	// offer contains the loads of the servers that passed the flow on. taker is the load of
	// f.Server, including this flow.
	Accepter interface {
		Accepted(f *Flow, offer *Offer, taker Load)
	}
	// Connecter sees the first acknowledgement.
	Connecter interface{ Connected(f *Flow) }
	// Closer sees the end of a flow.
	Closer interface{ Closed(f *Flow, end End) }
	// Silencer learns when a flow has been silent for SilentAfter seconds: its response ended that
	// long ago, and the client still keeps it open.
	Silencer interface {
		SilentAfter() float64
		Silent(f *Flow)
	}
	// Stepper is called every Interval seconds, from Interval on.
	Stepper interface {
		Interval() float64
		Step()
	}
	// Prober gets the answers to Balancer.Probe.
	Prober interface{ Probed(server int32, load Load) }
	// Member is told that Balancer.Live or Balancer.Peers have changed.
	Member interface{ MembershipChanged() }
	// Fallback places flows for which the flow table has no room. Without it, such a flow goes to
	// a server by its hash, as with ECMP.
	Fallback interface{ Untracked(f *Flow, offer *Offer) }
	// Recoverer lists the servers that may have a flow which the edge router has moved here from
	// another balancer. If the list contains f.Server, the flow continues on this balancer. If the
	// flow table has room for it, Accepted is called, and Connected if the flow was connected. If
	// the list does not contain f.Server, or without this interface, the flow is broken; an idle
	// flow ends.
	Recoverer interface{ Recover(f *Flow, offer *Offer) }
)

// Outcome is the way in which a flow ended.
type Outcome uint8

// The outcomes.
const (
	Completed Outcome = iota
	Refused           // the server's backlog was full, or its application had failed
	TimedOut          // the client gave up
	// No balancer was left; or the flow was offered to no server, or to one that had failed; or it
	// moved to another balancer before a server took it.
	Lost
	// Its server failed; or it moved to another balancer, which did not find its server; or no
	// balancer was left.
	Broken
	numOutcomes
)

var outcomeNames = [...]string{"completed", "refused", "timed-out", "lost", "broken"}

// String returns the name of the outcome in the output.
func (o Outcome) String() string { return outcomeNames[o] }

// End is what a balancer learns at the end of a flow.
type End struct {
	// Duration is the time from the first acknowledgement to the end, in seconds. It is 0 if there
	// was no acknowledgement.
	Duration float64
	Outcome  Outcome
	// Load is the load of the server when the flow left it (remove-stickiness). It is not set, and
	// its CPUs are 0, if no server had the flow, if the server failed, or if the flow moved to
	// another balancer.
	Load Load
}

// Policy is an accept policy with its parameters: it determines what servers do with offers. Runs
// that go on at the same time share it, so New must not change it.
type Policy interface {
	// New returns the agent of one server in one run.
	New(*Host) (Agent, error)
}

// Agent decides about offers on one server.
type Agent interface {
	// Decide returns the index in offer.Servers of the server that gets the flow next. offer.At
	// means that this server takes it, and offer.At+1 passes it on. A smaller index sends it back
	// to that server, which then must take it. offer.Loads[offer.At] is the server's own load at
	// first. The agent may change it, to tell later servers something else. The last server of the
	// list must not pass the flow on.
	Decide(own Load, offer *Offer) int32
}

// The optional interfaces of agents.
type (
	// Observer learns about each flow that the server has served to the end: the seconds since the
	// flow's first acknowledgement passed the balancer, and the number of other open flows when the
	// flow was taken, at most 255.
	Observer interface {
		Served(duration float64, others int32)
	}
	// Estimator computes Load.Latency.
	Estimator interface{ Latency(own Load) float64 }
)

// Host is a server as its agent sees it.
type Host struct {
	// Index is the index of the server in Config.Servers.
	Index int
	// Rand is a stream of random numbers for this agent only.
	Rand *Rand
	e    *engine
}

// Now returns the time since the start of the run, in seconds.
func (h *Host) Now() float64 { return h.e.now }

// Balancer is a balancer as its placement sees it.
type Balancer struct {
	// Index is the index of the balancer in Config.Balancers.
	Index int
	// Servers are all servers of the run, including those that are added later or have failed.
	// Placements must not change them.
	Servers []Server
	// Live are the indexes of the servers that balancers consider live, in ascending order. The
	// slice belongs to the engine and changes with MembershipChanged.
	Live []int32
	// Peers are the indexes of the balancers at work, including this one. They change like Live.
	Peers []int32
	// Rand is a stream of random numbers for this placement on this balancer only.
	Rand *Rand
	// World is the true state. It is for placements that serve as bounds for others.
	World World
	e     *engine
}

// Now returns the time since the start of the run, in seconds.
func (b *Balancer) Now() float64 { return b.e.now }

// Probe asks a server for its load. Prober gets the answer after the round trip, or never if the
// server has failed.
func (b *Balancer) Probe(server int32) { b.e.probe(b.Index, server) }

// ECMP returns the live server that the flow's hash selects, or -1 if there is none.
func (b *Balancer) ECMP(f *Flow) int32 {
	if len(b.Live) == 0 {
		return -1
	}
	return b.Live[scale(mix(f.Key), len(b.Live))]
}
