// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"context"
	"math"
)

// The events of the queue. The ends of services are not among them: those are in a tournament of
// their own (see station).
const (
	synAtBalancer       eventKind = iota // index of the flow
	offerAtServer                        // of the flow
	acceptedAtBalancer                   // of the flow
	connectedAtBalancer                  // of the flow
	requestAtServer                      // of the flow
	closedAtBalancer                     // of the flow
	step                                 // of the balancer
	probeAtServer                        // of the probe
	probeAtBalancer                      // of the probe
	change                               // in Config.Events
	detection                            // in Config.Events
	sample
	interval
)

// ofFlow tells whether the event is one of a flow.
func (k eventKind) ofFlow() bool { return k < step }

// engine is one run.
type engine struct {
	config *Config
	run    int
	now    float64

	flows        []flow
	transits     []transit
	idleTransits []int32
	free         int32 // the first free flow

	queue    eventQueue
	services *Tournament // when the next flow leaves each slot
	slots    []slot

	servers    []server
	changes    []int32 // by server: the last event that had it come or go
	processors float64 // of all servers
	agents     []agent // by server; none without a policy
	stations   []station
	balancers  []balancer
	unequal    bool    // the balancers' weights
	live       []int32 // servers, as balancers know
	peers      []int32 // balancers
	probes     []probe
	idle       []int32 // probes that are not under way

	source   Source
	arriving bool
	arrival  float64
	class    int32
	size     float64
	arrivals uint64 // so far
	// sizes are those of flows that have not ended, by Flow.Number; nil if no job needs them. They
	// are not in flow, which fills its cache line.
	sizes      map[uint64]float64
	keys       *Rand
	shares     []float64 // of classes, cumulated
	probeDraws *Rand

	result *RunResult
	meter  meter
	series series
	until  float64 // arrivals go on, once that is known
}

// simulate is one run, from its start until its last flow has ended.
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

// cancelCheck is how many steps pass between looks at the context.
const cancelCheck = 1 << 14

// loop handles one event after the other. Of events at one time an end of a service comes first, then
// what is in the queue, then an arrival.
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
			if math.IsInf(service, 1) {
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

// over tells whether nothing is left to happen but what repeats itself.
func (e *engine) over() bool { return !e.arriving && e.result.underWay == 0 }

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
	}
}

// send has something happen to a flow after a delay; without one it happens at once.
func (e *engine) send(delay float64, kind eventKind, f int32) {
	e.hold(f)
	if delay > 0 {
		e.queue.push(e.now+delay, kind, f)
		return
	}
	e.handle(kind, f)
	e.release(f)
}

// delay draws that of a packet of the flow.
func (e *engine) delay(d *Distribution, f int32) float64 {
	if d.zero() {
		return 0
	}
	return d.sample(e.flows[f].draw())
}

// nextArrival finds out when the next flow arrives.
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
		if ok {
			e.until = c.Duration
		}
		if e.meter.open {
			e.closeWindow()
		}
	}
}

// arrive has a flow begin.
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

// newborn is a flow whose SYN the client has just sent.
func newborn(key, number uint64, now float64) flow {
	return flow{Flow: Flow{Key: key, Number: number, Server: none, transit: none}, sent: now, next: none, phase: underWay}
}

// drawClass draws a class by the jobs' shares.
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
