// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/infer"
)

// rankLines returns the number of lines for the rankings of servers in this number of slots. Two
// lines for a slot suffice: a service with one server has one line, and a service whose servers
// change has two rankings for a moment.
func rankLines(slots uint32) uint32 { return 2*slots + 64 }

// timedFlows returns how many flows are timed at once. The argument is the number of flows that the
// flow table is made for. The result is a power of two, about a sixteenth of the argument, and at
// most 65536: so many fit into the second-level cache.
func timedFlows(flows uint32) uint32 { return max(1, min(flowBuckets(flows)/4, 1<<16)) }

// LoadTable is what the data path knows of the loads of servers, by slot: the maps loads, ends and
// reservoirs, mapped into this process. Only this process changes the prices, the numbers at which
// counts begin, and the marks of servers whose flows are timed. Packets change all other fields.
type LoadTable struct {
	memory     [3][]byte
	loads      []balancerLoad
	ends       []balancerEnds
	reservoirs []balancerReservoir
}

// mapLoads maps the tables. The protection is PROT_READ, or PROT_READ|PROT_WRITE to change them.
func mapLoads(m *Maps, protection int) (*LoadTable, error) {
	t := &LoadTable{}
	var err error
	if t.memory[0], t.loads, err = mapArrayFor[balancerLoad](m.Loads, protection); err != nil {
		return nil, fmt.Errorf("map the loads of servers: %w", err)
	}
	if t.memory[1], t.ends, err = mapArrayFor[balancerEnds](m.Ends, protection); err != nil {
		return nil, errors.Join(fmt.Errorf("map the ends of flows: %w", err), t.close())
	}
	t.memory[2], t.reservoirs, err = mapArrayFor[balancerReservoir](m.Reservoirs, protection)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map the durations of flows: %w", err), t.close())
	}
	return t, nil
}

func (t *LoadTable) close() error {
	var errs []error
	for _, memory := range t.memory {
		if memory != nil {
			errs = append(errs, unix.Munmap(memory))
		}
	}
	return errors.Join(errs...)
}

// Flows returns two numbers of flows of the slot's server in both flow tables: flows of which one
// packet was seen, and established flows that are not silent. A number that is below 0 for a moment
// (bpf/balancer/tables/loads.h) is returned as 0.
func (t *LoadTable) Flows(slot uint32) (unconfirmed, established uint32) {
	return t.numbers(slot).current()
}

// loadNumbers are the numbers of flows in a load: see struct load in bpf/balancer/types.h.
type loadNumbers struct {
	placed, answered, lost uint32
	established            int32
}

// unconfirmed returns the number of flows of which one packet was seen.
func (n loadNumbers) unconfirmed() int32 { return int32(n.placed - n.answered - n.lost) }

// current returns the numbers of flows now. Numbers below 0 become 0.
func (n loadNumbers) current() (unconfirmed, established uint32) {
	return uint32(max(0, n.unconfirmed())), uint32(max(0, n.established))
}

// numbers reads the numbers of a slot. It reads three words one after the other, and packets can
// change them meanwhile.
func (t *LoadTable) numbers(slot uint32) loadNumbers {
	load := &t.loads[slot]
	// The low half of the word is the number of established flows, and the high half is that of
	// answered flows. If the low half is negative, it has borrowed 1 from the high half.
	flows := atomic.LoadUint64(&load.Flows)
	established := int32(flows)
	return loadNumbers{
		answered: uint32((flows - uint64(int64(established))) >> 32), established: established,
		lost: atomic.LoadUint32(&load.Lost), placed: atomic.LoadUint32(&load.Placed),
	}
}

// Counters returns all that the data path counts for the slot's server.
func (t *LoadTable) Counters(slot uint32) (c infer.Counters) {
	n := t.numbers(slot)
	c.New, c.Established = n.current()
	c.Placed, c.Answered = t.placed(slot, n)
	c.EndedNew = atomic.LoadUint32(&t.ends[slot].ByFlows[0])
	for i := range c.Ended {
		c.Ended[i] = atomic.LoadUint32(&t.ends[slot].ByFlows[i+1])
	}
	return c
}

// Placed returns how many new flows were placed on the slot's server, and how many of them had a
// second packet, modulo 2^32.
func (t *LoadTable) Placed(slot uint32) (placed, answered uint32) {
	return t.placed(slot, t.numbers(slot))
}

// placed returns the numbers of placed and answered flows since beginCounts.
func (t *LoadTable) placed(slot uint32, n loadNumbers) (placed, answered uint32) {
	load := &t.loads[slot]
	return n.placed - atomic.LoadUint32(&load.PlacedBefore),
		n.answered - atomic.LoadUint32(&load.AnsweredBefore)
}

// SetTiming tells the data path which durations of the flows of the slot's server to sample. If
// that changes, it empties the sample.
func (p *Plane) SetTiming(slot uint32, timing infer.Timing) {
	if load := &p.Loads.loads[slot]; load.Timing != uint8(timing) {
		p.backup.keepSample(slot)
		load.Timing = uint8(timing)
		p.Loads.reservoirs[slot] = balancerReservoir{}
	}
}

// flag returns 1 for true, and 0 for false, so that one store writes a flag. Between a store of 0
// and a store of 1, a packet could see the wrong value.
func flag(is bool) uint8 {
	if is {
		return 1
	}
	return 0
}

// Durations appends the sample of the durations of the server's flows to a list, in seconds.
func (t *LoadTable) Durations(slot uint32, list []float64) []float64 {
	reservoir := &t.reservoirs[slot]
	count := min(atomic.LoadUint32(&reservoir.Count), uint32(len(reservoir.Duration)))
	for i := range count {
		list = append(list, float64(atomic.LoadUint32(&reservoir.Duration[i]))/1e6)
	}
	return list
}

// SetPrice sets the price of the slot's server. Its rank changes when it is ranked again. Packets
// can see a part of the new price with the rest of the old one.
func (t *LoadTable) SetPrice(slot uint32, price infer.Price) {
	load := &t.loads[slot]
	atomic.StoreUint32(&load.Unit, price.Unit)
	atomic.StoreUint32(&load.Extra, price.Extra)
	atomic.StoreUint32(&load.Stale, price.Stale)
	load.Position, load.IsAway = price.Position, flag(price.Away)
}

// Try gives the slot's server a number of trials: as soon as it is ranked again, it gets at least
// this number of the next flows. If it has more trials left, it keeps them. The number 0 ends all
// trials. Packets may take trials at the same time: if one does, Try changes nothing.
func (t *LoadTable) Try(slot, flows uint32) {
	trials := &t.loads[slot].Trials
	if left := atomic.LoadInt32(trials); flows == 0 || left < int32(flows) {
		atomic.CompareAndSwapInt32(trials, left, int32(flows))
	}
}

// Price returns the price of the slot's server.
func (t *LoadTable) Price(slot uint32) infer.Price {
	return priceOf(&t.loads[slot])
}

func priceOf(load *balancerLoad) infer.Price {
	return infer.Price{
		Unit: atomic.LoadUint32(&load.Unit), Extra: atomic.LoadUint32(&load.Extra),
		Position: load.Position, Away: load.IsAway != 0, Stale: atomic.LoadUint32(&load.Stale),
	}
}

// Score returns the score of the slot's server, with its position and its slot in the lowest bits
// (ScoreTie). The data path chooses the server with the lowest score.
func (t *LoadTable) Score(slot uint32) uint64 {
	unconfirmed, established := t.Flows(slot)
	score := t.Price(slot).Score(established, unconfirmed, uint16(slot))
	if atomic.LoadInt32(&t.loads[slot].Trials) > 0 {
		score &= ScoreTie // a server with trials left has a delay of 0
	}
	return score
}

// forgetLoad removes the trials of the slot's server, and its sample of durations. It is for a
// removed server that is added again while it still has its slot.
func (p *Plane) forgetLoad(slot uint32) error {
	if p.backup != nil {
		if err := p.backup.keepCounters(slot); err != nil {
			return err
		}
	}
	atomic.StoreInt32(&p.Loads.loads[slot].Trials, 0)
	p.Loads.reservoirs[slot] = balancerReservoir{}
	return nil
}

// reset removes all that is known of the slot's server, except the numbers of its flows, which
// always equal those of its entries.
func (t *LoadTable) reset(slot uint32) {
	t.put(slot, slotLoad{})
	t.beginCounts(slot)
}

// beginCounts makes the numbers of placed and answered flows of the slot's server begin with 0. It
// is called when the server gets into a ranking: under placements that do not infer, flows can be
// counted as placed and never as answered.
func (t *LoadTable) beginCounts(slot uint32) {
	n := t.numbers(slot)
	t.putCounts(slot, &balancerLoad{PlacedBefore: n.placed, AnsweredBefore: n.answered})
}

// putCounts replaces where the numbers of placed and answered flows begin.
func (t *LoadTable) putCounts(slot uint32, load *balancerLoad) {
	atomic.StoreUint32(&t.loads[slot].PlacedBefore, load.PlacedBefore)
	atomic.StoreUint32(&t.loads[slot].AnsweredBefore, load.AnsweredBefore)
}

// Delay returns the delay that the next flow of the slot's server is expected to have. Up to 1, the
// server serves the flow at once.
func (t *LoadTable) Delay(slot uint32) float64 {
	unconfirmed, established := t.Flows(slot)
	// Unlike the method Score, this ignores trials.
	delay := t.Price(slot).Score(established, unconfirmed, 0) >> scoreShift
	if delay > infer.PriceOne { // the score adds 1 if the flow waits, or the server is away
		delay -= infer.PriceOne
	}
	return float64(delay) / infer.PriceOne
}

const (
	// scoreShift is RANK_SCORE_SHIFT in bpf/balancer/tables/ranking.h.
	scoreShift = 28
	// ScoreTie has the bits of a score that decide between servers of equal delay.
	ScoreTie = 1<<scoreShift - 1
)

// slotLoad is all that is known of the load of a slot's server.
type slotLoad struct {
	load      balancerLoad
	ends      balancerEnds
	durations balancerReservoir
}

func (t *LoadTable) of(slot uint32) slotLoad {
	return slotLoad{t.loads[slot], t.ends[slot], t.reservoirs[slot]}
}

// put replaces all that is known of the slot's server, except what packets count in the map loads.
func (t *LoadTable) put(slot uint32, all slotLoad) {
	t.putPrice(slot, &all.load)
	t.putCounts(slot, &all.load)
	atomic.StoreInt32(&t.loads[slot].Trials, all.load.Trials)
	t.ends[slot], t.reservoirs[slot] = all.ends, all.durations
}

// putPrice replaces the price of the slot's server, and how its flows are timed.
func (t *LoadTable) putPrice(slot uint32, load *balancerLoad) {
	t.SetPrice(slot, priceOf(load))
	t.loads[slot].Timing = load.Timing
}

// Clear sets all numbers of flows to zero: flows of one packet count as lost. Only tests that empty
// the flow tables call it.
func (t *LoadTable) Clear() {
	for slot := range t.loads {
		n := t.numbers(uint32(slot))
		atomic.AddUint32(&t.loads[slot].Lost, uint32(n.unconfirmed()))
		atomic.AddUint64(&t.loads[slot].Flows, uint64(-int64(n.established)))
	}
}

// count counts a restored entry as a load of its server again. The sweep that freed the entry has
// subtracted it (count_states in bpf/balancer/tables/flowtable.h).
func (t *LoadTable) count(entry FlowEntry) {
	switch entry.State() {
	case FlowNew:
		atomic.AddUint32(&t.loads[entry.Server()].Lost, ^uint32(0)) // minus 1
	case FlowEstablished:
		atomic.AddUint64(&t.loads[entry.Server()].Flows, 1)
	}
}
