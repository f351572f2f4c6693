// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/packet"
)

// printed is a balancer whose service has estimator hlb, and the algorithm as the paper prints it
// (HLB, section IV), which must do the same.
type printed struct {
	*ranked
	slots     []uint32 // of the servers, in the order of the configuration
	flows     []printedFlow
	ongoing   []uint64       // the paper's l, by server
	timed     map[uint32]int // flows by their places in the map starts
	hit       map[int]bool   // places of reservoirs that got a duration
	durations int
}

type printedFlow struct {
	infer.Algorithm1
	server    int // its index; -1: not placed
	state     infer.State
	syn, done time.Time // before and after the SYN
}

// unwritten is a duration that no flow of a test has.
const unwritten = 1<<32 - 1

func openPrinted(t *testing.T, estimator desired.Estimator, servers int, flows uint16) *printed {
	t.Helper()
	cfg := inferring(manyServers(servers)...)
	cfg.Services[0].Infer.Estimator = estimator
	slow := time.Hour // which HLB ignores
	cfg.Services[0].Infer.SlowStart = &slow
	p := &printed{
		ranked: openRanked(t, cfg, 4096, flows), ongoing: make([]uint64, servers),
		hit: map[int]bool{}, flows: make([]printedFlow, flows), timed: map[uint32]int{},
	}
	p.slots = p.services.byName["web"].slots()
	for i := range p.flows {
		p.flows[i].server = -1
	}
	return p
}

// lowestScore returns the paper's choice: arg min (l + 1) / w. Of several such servers, it is the
// one with the least position.
func (p *printed) lowestScore() (best int) {
	scores := make([]uint64, len(p.slots))
	for i, slot := range p.slots {
		price := p.plane.Loads.Price(slot)
		scores[i] = (p.ongoing[i]+1)*uint64(price.Unit)<<12 | uint64(price.Position)
	}
	return slices.Index(scores, slices.Min(scores))
}

// packet sends a packet of a flow, and compares its effects with the algorithm's.
func (p *printed) packet(number int, flags packet.TCPFlags) {
	p.t.Helper()
	flow, best := &p.flows[number], p.lowestScore()
	for _, slot := range p.slots {
		reservoir := [reservoirSize + 2]uint32{}
		for i := range reservoirSize {
			reservoir[2+i] = unwritten
		}
		p.must(p.plane.Objects.Reservoirs.Put(slot, reservoir))
	}
	before := time.Now()
	p.exec(p.frames[flags][number], nil)
	after := time.Now()
	if flow.server < 0 { // it is the SYN
		flow.syn, flow.done = before, after
		flow.server = slices.Index(p.slots, p.entry(p.ranked.flows[number]).Server())
		if flow.server != best {
			p.t.Fatalf("flow %d goes to server %d, want %d; flows %v", number, flow.server, best, p.ongoing)
		}
		if _, isTaken := p.timed[p.startOf(number)]; !isTaken {
			p.timed[p.startOf(number)] = number
		}
	}
	kind := infer.Data
	switch {
	case flags == packet.SYN:
		kind = infer.Open
	case flags&(packet.FIN|packet.RST) != 0:
		kind = infer.End
	}
	var change int32
	flow.state, change = flow.state.Next(kind)
	p.ongoing[flow.server] += uint64(change)
	_, registers := flow.Packet(kind, float64(before.UnixNano()))
	owner, isTimed := p.timed[p.startOf(number)]
	registers = registers && isTimed && owner == number
	if kind == infer.End && owner == number {
		delete(p.timed, p.startOf(number))
	}
	for i, slot := range p.slots {
		if _, got := p.plane.Loads.Flows(slot); uint64(got) != p.ongoing[i] {
			p.t.Fatalf("flow %d, %v: server %d has %d flows, want %d", number, flags, i, got, p.ongoing[i])
		}
		p.checkReservoir(flow, i, registers && i == flow.server, before, after)
	}
}

// startOf returns the place for the start of a flow. Another flow may have it.
func (p *printed) startOf(number int) uint32 {
	places := p.plane.Objects.Starts.MaxEntries()
	return uint32(p.entry(p.ranked.flows[number]).Signature()) & (places - 1)
}

// checkReservoir requires that a packet has put one duration into the reservoir of a server, that
// of its flow since the SYN, or none.
func (p *printed) checkReservoir(
	flow *printedFlow, server int, registers bool, before, after time.Time,
) {
	p.t.Helper()
	var reservoir [reservoirSize + 2]uint32
	p.must(p.plane.Objects.Reservoirs.Lookup(p.slots[server], &reservoir))
	var found []uint32
	for place, duration := range reservoir[2:] {
		if duration != unwritten {
			found = append(found, duration)
			p.hit[place] = true
		}
	}
	if !registers {
		if len(found) > 0 || reservoir[0] != 0 {
			p.t.Fatalf("server %d: durations %v, count %d, want none", server, found, reservoir[0])
		}
		return
	}
	p.durations++
	if len(found) != 1 || reservoir[0] != reservoirSize {
		p.t.Fatalf("server %d: durations %v, count %d", server, found, reservoir[0])
	}
	got := time.Duration(found[0]) * time.Microsecond
	least, most := before.Sub(flow.done)-2*time.Microsecond, after.Sub(flow.syn)+2*time.Microsecond
	if got < least || got > most {
		p.t.Fatalf("server %d: a duration of %v, want %v to %v", server, got, least, most)
	}
}

// price gives the servers units and positions at random. Some units are equal.
func (p *printed) price() {
	p.t.Helper()
	positions := p.random.Perm(len(p.slots))
	for i, slot := range p.slots {
		price := p.plane.Loads.Price(slot)
		if price.Stale != 1<<32-1 || price.Away || price.Extra != 0 {
			p.t.Fatalf("server %d has the price %+v", i, price)
		}
		price.Position = uint16(positions[i])
		price.Unit = infer.PriceOne/2 + uint32(p.random.IntN(4))*infer.PriceOne/5
		p.plane.Loads.SetPrice(slot, price)
	}
	p.rank()
}

// Placement, numbers of flows and samples of durations are those of HLB as printed, for packets of
// many flows in a random order.
func TestHLBAsPrinted(t *testing.T) {
	t.Parallel()
	const together = 40
	p := openPrinted(t, desired.EstimateHLB, 5, 400)
	var open []int
	for next := 0; next < len(p.flows); {
		if len(open) < together && p.random.IntN(3) == 0 {
			if next%50 == 0 {
				p.price()
			}
			open = append(open, next)
			p.packet(next, packet.SYN)
			next++
			continue
		}
		if len(open) == 0 {
			continue
		}
		at := p.random.IntN(len(open))
		flags := rankedFlags[p.random.IntN(len(rankedFlags))]
		if p.random.IntN(2) == 0 {
			flags = packet.ACK
		}
		p.packet(open[at], flags)
		if flags == packet.RST || flags == packet.FIN|packet.ACK {
			open = slices.Delete(open, at, at+1)
		}
	}
	// With this many durations, fewer than one place is expected to be left out.
	if p.durations < 700 || len(p.hit) < reservoirSize-10 {
		t.Errorf("%d durations hit %d of %d places", p.durations, len(p.hit), reservoirSize)
	}
}

// A flow of which the table knows that it has ended begins anew with a SYN: its time begins with
// this SYN. A flow that was silent for so long that it does not count is not timed any more.
func TestHLBTimesAnew(t *testing.T) {
	t.Parallel()
	p := openPrinted(t, desired.EstimateHLB, 1, 2)
	durations := func() (list []float64) {
		for _, d := range p.plane.Loads.Durations(p.slots[0], nil) {
			if d > 0 {
				list = append(list, d)
			}
		}
		return list
	}
	send := func(flow int, all ...packet.TCPFlags) {
		for _, flags := range all {
			p.exec(p.frames[flags][flow], nil)
		}
	}
	send(0, packet.SYN, packet.ACK, packet.FIN|packet.ACK)
	if got := durations(); len(got) != 1 {
		t.Errorf("durations %v after the first connection", got)
	}
	p.elapseFlows(3, everyFlow)
	p.must(p.plane.Objects.Reservoirs.Put(p.slots[0], [reservoirSize + 2]uint32{}))
	time.Sleep(20 * time.Millisecond) // an earlier start would show
	again := time.Now()
	send(0, packet.SYN, packet.ACK, packet.ACK)
	if got := durations(); len(got) != 1 || got[0] > time.Since(again).Seconds() {
		t.Errorf("durations %v after a second connection of %v", got, time.Since(again))
	}

	send(1, packet.SYN, packet.ACK)
	lifetimes := dataplane.Forever
	lifetimes.Silent = 0
	p.elapseFlows(1, everyFlow)
	_, err := p.plane.Sweeper.Sweep(func(yield func(uint32, dataplane.FlowLifetimes) bool) {
		yield(p.slots[0], lifetimes)
	})
	p.must(err)
	p.must(p.plane.Objects.Reservoirs.Put(p.slots[0], [reservoirSize + 2]uint32{}))
	send(1, packet.ACK, packet.ACK)
	if got := durations(); len(got) != 0 {
		t.Errorf("a flow that was silent gives the durations %v", got)
	}
}

// A new estimator begins with an empty sample, and servers of services with other estimators are
// not timed by packets.
func TestTimingOfEstimators(t *testing.T) {
	t.Parallel()
	p := openPrinted(t, desired.EstimateHLB, 2, 1)
	for _, flags := range []packet.TCPFlags{packet.SYN, packet.ACK, packet.ACK} {
		p.exec(p.frames[flags][0], nil)
	}
	sample := func() []float64 {
		return p.plane.Loads.Durations(p.entry(p.ranked.flows[0]).Server(), nil)
	}
	if got := sample(); len(got) != reservoirSize {
		t.Errorf("hlb has %d durations, want %d with zeros", len(got), reservoirSize)
	}
	cfg := *p.cfg
	cfg.Services = slices.Clone(cfg.Services)
	cfg.Services[0].Infer = &desired.Infer{
		Estimator: desired.EstimateDurations, Interval: time.Second, Among: desired.AmongAll,
	}
	p.mustApply(&cfg)
	if got := sample(); len(got) != 0 {
		t.Errorf("estimator durations begins with %d durations of hlb", len(got))
	}
	p.exec(p.frames[packet.ACK][0], nil)
	if got := sample(); len(got) != 0 {
		t.Errorf("estimator durations has %v before a flow has ended", got)
	}
}
