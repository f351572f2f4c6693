// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"math"
)

// The events of the queue. The ends of services are not in the queue, but in a separate tournament
// (see station).
const (
	synAtBalancer       eventKind = iota // index of the flow
	offerAtServer                        // index of the flow
	acceptedAtBalancer                   // index of the flow
	connectedAtBalancer                  // index of the flow
	requestAtServer                      // index of the flow
	closedAtBalancer                     // index of the flow
	silentAtBalancer                     // index of the flow
	idleEnds                             // index of the flow
	step                                 // index of the balancer
	probeAtServer                        // index of the probe
	probeAtBalancer                      // index of the probe
	change                               // index in Config.Events
	detection                            // index in Config.Events
	sample
	interval
	floodSYN
)

// ofFlow tells whether the index of the event is that of a flow.
func (k eventKind) ofFlow() bool { return k < step }

// engine executes one run.
type engine struct {
	config *Config
	run    int
	now    float64

	flows        []flow
	transits     []transit
	idleTransits []int32 // indexes in transits that are not in use
	free         int32   // the first free flow

	clients *clients // nil without affinity

	queue    eventQueue
	services *Tournament // for each slot, the time at which its next flow leaves
	slots    []slot

	servers    []server
	changes    []int32 // by server: the last event that added, drained or failed it
	processors float64 // number of processors of all servers
	agents     []agent // by server; nil without a policy
	stations   []station
	balancers  []balancer
	unequal    bool    // the balancers have different weights
	live       []int32 // the servers that balancers consider live
	peers      []int32 // the balancers at work
	probes     []probe
	idleProbes []int32 // indexes in probes that are not in use

	source   Source
	arriving bool
	arrival  float64 // time of the next arrival
	class    int32   // of the next arrival, as in Arrival
	size     float64 // of the next arrival
	arrivals uint64  // arrivals so far
	// sizes are the sizes of the flows that have not ended, by Flow.Number. It is nil if no job
	// needs sizes. They are not in flow, because flow fills its cache line.
	sizes      map[uint64]float64
	keys       *Rand
	shares     []float64 // by class: the sum of the shares up to that class
	probeDraws *Rand
	floodDraws *Rand

	result *RunResult
	meter  meter
	series series
	until  float64 // the end of the arrivals, once it is known
}

// simulate executes one run, from its start until its last flow has ended.
func simulate(ctx context.Context, c *Config, seed uint64, run int) (*RunResult, error) {
	e, err := newEngine(c, seed, run)
	if err != nil {
		return nil, err
	}
	err = e.loop(ctx)
	if closing := e.source.Close(); err == nil {
		err = closing
	}
	if err != nil {
		return nil, err
	}
	return e.finish(), nil
}

// cancelCheck is the number of steps between two checks of the context.
const cancelCheck = 1 << 14

// loop handles the events one by one until none is left. Of several events at the same time, ends
// of services come first, then events of the queue, then arrivals.
func (e *engine) loop(ctx context.Context) error {
	for i := 0; ; i++ {
		if i%cancelCheck == 0 {
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		service, slot := e.services.Min()
		queued := math.Inf(1)
		if len(e.queue.heap) > 0 {
			queued = e.queue.heap[0].at
		}
		switch {
		case service <= queued && service <= e.arrival:
			if math.IsInf(service, 1) { // and so are queued and e.arrival: no event is left
				return nil
			}
			e.now = service
			e.serviceEnds(slot)
		case queued <= e.arrival:
			next := e.queue.pop()
			if !next.kind.ofFlow() && e.over() {
				continue
			}
			e.now = next.at
			e.handle(next.kind, next.index)
			if next.kind.ofFlow() {
				e.release(next.index)
			}
		default:
			e.now = e.arrival
			e.arrive()
		}
	}
}

// over tells whether all flows have ended and no more arrive. Events that are not of flows are then
// dropped: periodic ones would never end.
func (e *engine) over() bool { return !e.arriving && e.result.underWay == 0 }

// handle calls the method for an event of the given kind. The list of kinds says what index is.
func (e *engine) handle(kind eventKind, index int32) {
	switch kind {
	case synAtBalancer:
		e.place(index)
	case offerAtServer:
		e.offered(index)
	case acceptedAtBalancer:
		e.acceptedAt(index)
	case connectedAtBalancer:
		e.connect(index)
	case requestAtServer:
		e.request(index)
	case closedAtBalancer:
		e.close(index)
	case silentAtBalancer:
		e.silent(index)
	case idleEnds:
		e.endIdle(index)
	case step:
		e.step(index)
	case probeAtServer:
		e.probed(index)
	case probeAtBalancer:
		e.answered(index)
	case change:
		e.change(&e.config.Events[index], index)
	case detection:
		e.detect(&e.config.Events[index], index)
	case sample:
		e.config.Sample(e.run, e.now, World{e})
		e.queue.push(e.now+e.config.SampleInterval, sample, 0)
	case interval:
		e.endInterval()
	case floodSYN:
		e.flood()
	}
}

// send schedules an event of a flow after a delay. Without a delay, the event happens at once.
func (e *engine) send(delay float64, kind eventKind, f int32) {
	e.hold(f)
	if delay > 0 {
		e.queue.push(e.now+delay, kind, f)
		return
	}
	e.handle(kind, f)
	e.release(f)
}

// delay draws the delay of a packet of the flow.
func (e *engine) delay(d *Distribution, f int32) float64 {
	if d.zero() {
		return 0
	}
	return d.Sample(e.flows[f].draw())
}

// nextArrival determines when the next flow arrives. If the source has no more flows, or
// Connections or Duration is reached, it ends the arrivals and closes the window.
func (e *engine) nextArrival() {
	c := e.config
	ok := false
	if c.Connections == 0 || e.arrivals < c.Connections {
		var next Arrival
		next, ok = e.source.Next()
		e.arrival, e.class, e.size = next.At, next.Class, next.Size
	}
	if !ok || c.Duration > 0 && e.arrival >= c.Duration {
		e.arriving, e.arrival = false, never
		e.result.LastArrival, e.until = e.now, e.now
		if ok { // flows would still arrive after Duration
			e.until = c.Duration
		}
		if e.meter.open {
			e.closeWindow()
		}
	}
}

// arrive starts a flow, and determines when the next one arrives. The edge router sends the flow's
// SYN to a balancer. If there is no balancer, the flow is lost.
func (e *engine) arrive() {
	e.watchWindow()
	f := e.newFlow()
	flow := &e.flows[f]
	key := e.keys.Uint64()
	*flow = newborn(key, e.arrivals, e.now)
	flow.Class = int16(e.class)
	if e.class < 0 {
		flow.Class = e.drawClass(flow)
	}
	if e.sizes != nil {
		e.sizes[flow.Number] = e.size
	}
	flow.measured = e.meter.open
	flow.balancer = int16(e.edgeChoice(key))
	e.arrivals++
	e.result.underWay++
	e.nextArrival()
	e.hold(f)
	if flow.balancer == none {
		e.end(f, Lost)
	} else {
		e.send(e.delay(&e.config.Network.ClientBalancer, f), synAtBalancer, f)
	}
	e.release(f)
}

// newborn returns a flow whose client has just sent the SYN.
func newborn(key, number uint64, now float64) flow {
	return flow{
		Flow: Flow{Key: key, Number: number, Server: none, transit: none},
		sent: now, next: none, phase: underWay,
	}
}

// drawClass draws a class by the shares of the jobs.
func (e *engine) drawClass(flow *flow) int16 {
	if len(e.shares) == 1 {
		return 0
	}
	at := unit(flow.draw()) * e.shares[len(e.shares)-1]
	for class, sum := range e.shares {
		if at < sum {
			return int16(class)
		}
	}
	return int16(len(e.shares) - 1)
}
