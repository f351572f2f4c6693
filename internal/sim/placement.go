// SPDX-License-Identifier: Apache-2.0

package sim

// MaxChain is the longest list of servers that a flow can be offered to.
const MaxChain = 8

// Flow is a connection as its balancer sees it. Placements may read it during the call only: its
// memory is used again afterwards.
type Flow struct {
	// Key is the hash of the 5-tuple: 64 random bits, the same whatever the placement.
	Key uint64
	// Number counts the flows of a run by arrival, from 0.
	Number uint64
	// Server has the flow; -1 before one has taken it.
	Server int32
	// Mark is the placement's own: what it wants to remember of the flow. It begins as 0, on each
	// balancer that the flow comes to.
	Mark uint32
	// transit is what its packets carry; here because there is room.
	transit int32
	// Class is the index of the flow's job in Config.Jobs. A layer-4 balancer does not know it.
	Class int16
	// Connected tells whether the first acknowledgement has passed the balancer (state CONN of HLB).
	Connected bool
	// found is how many flows its server had when it took this one, at most 255; here as transit.
	found uint8
}

// Offer is the list of servers to which a new flow is offered in turn, as the segments of a SYN.
type Offer struct {
	// N is the length of the list, 1 to MaxChain.
	N int32
	// At is the index of the server that the SYN is at; while the balancer places, 0.
	At      int32
	Servers [MaxChain]int32
	// Loads are what the servers wrote that passed the flow on. Those of others are not set.
	Loads [MaxChain]Load
}

// Set makes the list.
func (o *Offer) Set(servers ...int32) { o.N = int32(copy(o.Servers[:], servers)) }

// Add appends to the list, which must be shorter than MaxChain.
func (o *Offer) Add(server int32) {
	o.Servers[o.N] = server
	o.N++
}

// Last tells whether no server comes after the one that the SYN is at.
func (o *Offer) Last() bool { return o.At == o.N-1 }

// Load is what a server says of itself, at the time that it says it.
type Load struct {
	Open    int32 // connections taken and not ended
	Busy    int32 // of those, served at the moment
	Waiting int32 // of those, behind the workers or processors in the backlog
	// Workers is how many can be served at once: with FIFO the processors, with processor sharing the
	// worker limit, 0 for none.
	Workers int32
	CPUs    int32
	// Capacity is in processors of speed 1.
	Capacity float64
	// Latency in seconds is what the server's agent makes of it (see Agent), otherwise 0.
	Latency float64
}

// Method is a placement with its parameters. It is shared by runs at the same time: New must not
// change it.
type Method interface {
	// New returns the placement of one balancer in one run.
	New(*Balancer) (Placement, error)
}

// Placement decides which servers a new flow is offered to, on one balancer. The engine calls it from
// one goroutine. What else it wants to know it gets by having the methods of the interfaces below.
//
// For every flow that was placed, and has an entry in the flow table, Closed is called once at the
// end, also if it was never taken or connected; unless the balancer itself has failed before.
type Placement interface {
	// Place makes the offer, which is empty. The last server on it has to take the flow. Flows with
	// no offer are lost.
	Place(f *Flow, offer *Offer)
}

// The interfaces that placements may have beside Placement. Flows without an entry in a flow table
// of limited size are in none of them, and are placed by Untracked.
type (
	// Accepter learns which server took a flow, from its create-stickiness: f.Server. The offer holds
	// what those said that passed it on, taker is the load of the server with the flow counted in.
	Accepter interface {
		Accepted(f *Flow, offer *Offer, taker Load)
	}
	// Connecter sees the first acknowledgement.
	Connecter interface{ Connected(f *Flow) }
	// Closer sees the end of a flow.
	Closer interface{ Closed(f *Flow, end End) }
	// Stepper is called every Interval seconds, from Interval on.
	Stepper interface {
		Interval() float64
		Step()
	}
	// Prober gets the answers to Balancer.Probe.
	Prober interface{ Probed(server int32, load Load) }
	// Member is told that Balancer.Live or Balancer.Peers have changed.
	Member interface{ MembershipChanged() }
	// Fallback places flows that the flow table has no room for. Without it they go to a server by
	// their hash, as with ECMP.
	Fallback interface{ Untracked(f *Flow, offer *Offer) }
	// Recoverer says where a flow may be that came here from a balancer that failed. If f.Server is
	// on the list, the flow lives on and is this balancer's (Accepted, and Connected if it was);
	// without, or without the interface, the flow is broken.
	Recoverer interface{ Recover(f *Flow, offer *Offer) }
)

// Outcome is how a flow ended.
type Outcome uint8

// The outcomes.
const (
	Completed Outcome = iota
	Refused           // the server's backlog was full
	TimedOut          // the client gave up
	Lost              // offered to nobody, or to a server that was gone
	Broken            // its server failed, or a balancer and nobody else knew the flow
	numOutcomes
)

var outcomeNames = [...]string{"completed", "refused", "timed-out", "lost", "broken"}

// String is the outcome in a word, as outputs have it.
func (o Outcome) String() string { return outcomeNames[o] }

// End is what a balancer sees at the end of a flow.
type End struct {
	// Duration is from the first acknowledgement to the end, in seconds; 0 if there was none.
	Duration float64
	Outcome  Outcome
	// Load is the server's, when the flow left it (remove-stickiness). Of flows that no server had,
	// whose server failed, or that have moved to another balancer, it is not set: its CPUs are 0.
	Load Load
}

// Policy is an accept policy with its parameters: what servers do with offers. It is shared by runs
// at the same time: New must not change it.
type Policy interface {
	// New returns what decides on one server in one run.
	New(*Host) (Agent, error)
}

// Agent decides on one server.
type Agent interface {
	// Decide returns the index in offer.Servers of the one that gets the flow next: offer.At takes it
	// here, offer.At+1 passes it on, and a smaller one hands it back to that server, which then has
	// to take it. What an agent wants to say to those after it is in offer.Loads[offer.At], which
	// begins as its own load. The last one must not pass on.
	Decide(own Load, offer *Offer) int32
}

// The interfaces that agents may have beside Agent.
type (
	// Observer sees the flows that its server has served to the end: the seconds since their first
	// acknowledgement passed the balancer, and how many others were open when they were taken, at
	// most 255.
	Observer interface {
		Served(duration float64, others int32)
	}
	// Estimator tells Load.Latency.
	Estimator interface{ Latency(own Load) float64 }
)

// Host is a server as its agent sees it.
type Host struct {
	// Index is the server's in Config.Servers.
	Index int
	// Rand is a stream of the agent's own.
	Rand *Rand
	e    *engine
}

// Now is the time since the start of the run, in seconds.
func (h *Host) Now() float64 { return h.e.now }

// Balancer is a balancer as its placement sees it.
type Balancer struct {
	// Index is the balancer's in Config.Balancers.
	Index int
	// Servers are all of the run, also those that come later or have gone. Placements must not change
	// it.
	Servers []Server
	// Live are the indexes, in ascending order, of the servers that flows can go to as far as
	// balancers know. The slice is the engine's and changes with MembershipChanged.
	Live []int32
	// Peers are the indexes of the balancers at work, this one included, as Live.
	Peers []int32
	// Rand is a stream of the placement's own on this balancer.
	Rand *Rand
	// World is the truth, for placements that are to be bounds for others.
	World World
	e     *engine
}

// Now is the time since the start of the run, in seconds.
func (b *Balancer) Now() float64 { return b.e.now }

// Probe asks a server for its load. Prober gets the answer after the round trip, or never if the
// server is gone.
func (b *Balancer) Probe(server int32) { b.e.probe(b.Index, server) }

// ECMP returns the live server that the flow's hash falls on, -1 if there is none.
func (b *Balancer) ECMP(f *Flow) int32 {
	if len(b.Live) == 0 {
		return -1
	}
	return b.Live[mix(f.Key)>>32*uint64(len(b.Live))>>32]
}
