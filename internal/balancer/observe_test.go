// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/packet"
)

// observer is the reference of bpf/balancer/tables/observe.h: what one core observes of its own
// flows. The flow clock stands still, and each flow has room in the flow table.
type observer struct {
	*ranked
	known    map[int]observedFlow       // by number of the flow
	counters map[uint32]*infer.Counters // by slot
	// isSwept tells that at any moment closing flows may be over, and others may become silent. The
	// entry after a packet shows that. Silent flows count as established here.
	isSwept bool
}

type observedFlow struct {
	slot  uint32
	state dataplane.FlowState
	// isOver tells that no late packet of a closing flow can be under way: the next packet begins
	// the flow again.
	isOver bool
}

func newObserver(r *ranked) *observer {
	return &observer{
		ranked: r, known: map[int]observedFlow{}, counters: map[uint32]*infer.Counters{},
	}
}

func (o *observer) of(slot uint32) *infer.Counters {
	if o.counters[slot] == nil {
		o.counters[slot] = &infer.Counters{}
	}
	return o.counters[slot]
}

// add counts a flow the given number of times: for the server in its slot, by its state.
func (o *observer) add(f observedFlow, times int) {
	switch f.state {
	case stateNew:
		o.of(f.slot).New += uint32(times)
	case stateEstablished:
		o.of(f.slot).Established += uint32(times)
	}
}

// send sends a packet, and observes it.
func (o *observer) send(flow int, flags packet.TCPFlags) {
	o.exec(o.frames[flags][flow], nil)
	entry := o.entry(o.flows[flow])
	before, isKnown := o.known[flow]
	slot, state := entry.Server(), entry.State()
	if o.isSwept && state == stateSilent {
		state = stateEstablished
	}
	if o.isSwept && before.state == stateClosing && state == stateEstablished {
		before.isOver = true
	}
	after := observedFlow{slot: slot, state: stateNew}
	stays := isKnown && before.slot == after.slot
	switch {
	case !stays, flags&packet.RST != 0 && before.state == stateNew:
	case flags&(packet.FIN|packet.RST) != 0:
		after.state = stateClosing
	case flags == packet.SYN, before.state == stateClosing && !before.isOver:
		after = before
	default:
		after.state = stateEstablished
	}
	if state != after.state {
		o.t.Fatalf("flow %d was %+v, and is %v after %v; want %v", flow, before, state,
			flags, after.state)
	}
	o.known[flow] = after
	o.add(before, -1)
	o.add(after, 1)
	was := before.state
	if !stays {
		was = stateFree
	}
	o.observe(was, after)
}

// observe counts a change of a flow. Ends count only if the server has a place in a ranking.
func (o *observer) observe(was dataplane.FlowState, after observedFlow) {
	c := o.of(after.slot)
	beginsAgain := was == stateClosing && after.state == stateEstablished
	if after.state == stateNew && was != stateNew || beginsAgain {
		c.Placed++
	}
	if was == stateNew && after.state != stateNew || beginsAgain {
		c.Answered++
	}
	switch isRanked := o.plane.Directory.Servers[after.slot].Rank > 0; {
	case !isRanked:
	case was == stateNew && after.state == stateClosing:
		c.EndedNew++
	case was == stateEstablished && after.state == stateClosing:
		c.Ended[min(int(c.Established)+1, len(c.Ended))-1]++
	}
}

// ranks returns the slots whose servers have a place in a ranking.
func (o *observer) ranks() map[uint32]bool {
	ranks := map[uint32]bool{}
	for slot, server := range o.plane.Directory.Servers {
		if server.Rank > 0 {
			ranks[uint32(slot)] = true
		}
	}
	return ranks
}

// sweep frees flows, or makes them silent, by slot and state.
func (o *observer) sweep() {
	o.t.Helper()
	slots := o.plane.Objects.ServerCounters.MaxEntries()
	lifetimes := slices.Repeat([]dataplane.FlowLifetimes{dataplane.Forever}, int(slots))
	for slot := range lifetimes {
		of := &lifetimes[slot]
		for _, lifetime := range []*uint16{&of.New, &of.Established, &of.Closed, &of.Silent} {
			if o.random.IntN(8) == 0 {
				*lifetime = 0
			}
		}
	}
	_, err := o.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for slot, of := range lifetimes {
			if !yield(uint32(slot), of) {
				return
			}
		}
	})
	o.must(err)
	for flow, f := range o.known {
		of := lifetimes[f.slot]
		isFreed := map[dataplane.FlowState]bool{
			stateNew: of.New == 0, stateEstablished: of.Established == 0,
			stateSilent: of.Established == 0, stateClosing: of.Established == 0,
		}[f.state]
		switch {
		case isFreed:
			o.add(f, -1)
			delete(o.known, flow)
		case f.state == stateEstablished && of.Silent == 0:
			o.add(f, -1)
			o.known[flow] = observedFlow{slot: f.slot, state: stateSilent}
		}
	}
}

// end lets so much time pass for closing flows that they are over.
func (o *observer) end() {
	o.endClosing()
	for flow, f := range o.known {
		f.isOver = f.state == stateClosing
		o.known[flow] = f
	}
}

// endClosing makes closing flows look as if they had ended two ticks ago, while packets change
// entries.
func (f *fixture) endClosing() {
	for i := range f.plane.Flows.Entries {
		at := &f.plane.Flows.Entries[i]
		value := atomic.LoadUint64(at)
		if e := dataplane.FlowEntry(value); e.State() == stateClosing {
			over := entryOf(e.Signature(), e.Server(), stateClosing, seenOf(e)-flowLinger)
			atomic.CompareAndSwapUint64(at, value, over)
		}
	}
}

// What the data path counts equals what the reference counts: also for repeated SYNs, flows that
// begin again or move to another server, sweeps, servers that come and go, and a service that
// infers at times.
func TestCountersFollowReference(t *testing.T) {
	t.Parallel()
	r := openRanked(t, inferring(manyServers(6)...), 1024, 400)
	limits := r.cfg.Node.Limits
	o := newObserver(r)
	for range 6000 {
		switch r.random.IntN(200) {
		case 0:
			o.sweep()
		case 2, 3:
			o.end()
		case 1:
			servers := manyServers(1 + r.random.IntN(8))
			cfg := inferring(servers...)
			if r.random.IntN(2) == 0 {
				cfg = placingBy(desired.PlacementHash, servers...)
			}
			cfg.Node.Limits = limits
			ranked := o.ranks()
			r.mustApply(cfg)
			for slot := range o.ranks() {
				if !ranked[slot] { // its counts begin anew
					o.of(slot).Placed, o.of(slot).Answered = 0, 0
				}
			}
		default:
			// Some flows get most of the packets, so that flows end and begin again.
			flow := r.random.IntN(1 + r.random.IntN(len(r.flows)))
			flags := rankedFlags[r.random.IntN(len(rankedFlags))]
			o.send(flow, flags)
		}
	}
	for slot := range r.plane.Objects.Loads.MaxEntries() {
		if got, want := r.plane.Loads.Counters(slot), *o.of(slot); got != want {
			t.Errorf("slot %d: %+v, want %+v", slot, got, want)
		}
	}
	r.checkEmptied()
}

// No count is lost when two cores observe the same servers, while flows are swept, prices change
// and the service is reloaded with other weights and other drained servers.
func TestCountersOfTwoCores(t *testing.T) {
	const servers = 2
	r := openRanked(t, inferring(manyServers(servers)...), 1024, 400)
	limits := r.cfg.Node.Limits
	cores := []*observer{newObserver(r), newObserver(r)}
	for _, o := range cores {
		o.isSwept = true
	}
	slots := r.services.byName["web"].slots()
	r.storm(12_000**collisions, func(core int, random *rand.Rand) {
		flow, flags := r.own(core, random)
		cores[core].send(flow, flags)
	}, func() {
		switch r.random.IntN(4) {
		case 0:
			cfg := inferring(manyServers(servers)...)
			for i := range cfg.Services[0].Servers[1:] { // the first one always takes flows
				s := &cfg.Services[0].Servers[1+i]
				s.Drained, *s.Weight = r.random.IntN(4) == 0, uint32(1+r.random.IntN(9))
			}
			cfg.Node.Limits = limits
			r.mustApply(cfg)
		case 1:
			r.changePrices()
			r.rank()
		default:
			r.endClosing()
			r.silence(slots[:servers/2])
		}
	})
	r.checkLoads()
	for i, slot := range slots {
		got, want := r.plane.Loads.Counters(slot), infer.Counters{}
		endedGot, endedWant := uint32(0), uint32(0)
		for _, o := range cores {
			c := o.of(slot)
			want.Placed, want.Answered = want.Placed+c.Placed, want.Answered+c.Answered
			want.EndedNew += c.EndedNew
			for _, n := range c.Ended { // a core does not know the flows of the other
				endedWant += n
			}
		}
		for _, n := range got.Ended {
			endedGot += n
		}
		got.New, got.Established, got.Ended = 0, 0, want.Ended // checkLoads has checked the flows
		least := endedWant
		if i < servers/2 { // the end of a silent flow is not counted
			least = endedWant / 2
		}
		if got != want || endedGot > endedWant || endedGot < least {
			t.Errorf("slot %d: %+v and %d ends, want %+v and %d", slot, got, endedGot, want, endedWant)
		}
	}
	r.checkEmptied()
}

// silence makes the established flows of the slots silent.
func (r *ranked) silence(silent []uint32) {
	r.t.Helper()
	_, err := r.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		for slot := range r.plane.Objects.ServerCounters.MaxEntries() {
			lifetimes := dataplane.Forever
			if slices.Contains(silent, slot) {
				lifetimes.Silent = 0
			}
			if !yield(slot, lifetimes) {
				return
			}
		}
	})
	r.must(err)
}
