// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"iter"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/bpfclock"
)

// FlowCounts are numbers of flows by state.
type FlowCounts struct {
	New         uint64 `json:"new"`         // one packet was seen
	Established uint64 `json:"established"` // more than one packet was seen
	Silent      uint64 `json:"silent"`      // established, but silent for timeouts.silent
	Closing     uint64 `json:"closing"`     // a FIN, a RST or remove-stickiness was seen: closing or closed
}

// Total is the number of flows in any state.
func (c FlowCounts) Total() uint64 { return c.New + c.Established + c.Silent + c.Closing }

func (c *FlowCounts) add(more FlowCounts) {
	c.New += more.New
	c.Established += more.Established
	c.Silent += more.Silent
	c.Closing += more.Closing
}

// countsOf returns the numbers of flows in an array by state, which another process may change
// meanwhile. The array counts closing flows as closed (COUNTED_FLOW_STATES in
// bpf/balancer/tables/flowstate.h).
func countsOf(states *[FlowSilent + 1]uint32) FlowCounts {
	return FlowCounts{
		New:         uint64(atomic.LoadUint32(&states[FlowNew])),
		Established: uint64(atomic.LoadUint32(&states[FlowEstablished])),
		Silent:      uint64(atomic.LoadUint32(&states[FlowSilent])),
		Closing:     uint64(atomic.LoadUint32(&states[FlowClosed])),
	}
}

// CountedFlows are the entries that a sweep has counted in both flow tables.
type CountedFlows struct{ Flows, HalfOpen FlowCounts }

// FlowCountTable is the table flow_counts of bpf/balancer/tables/maps.h, mapped into this process.
// It contains the numbers of flows that the last sweep has counted, by slot. The balancer writes it
// after each sweep. Readers of other processes read it meanwhile.
type FlowCountTable struct {
	memory []byte
	bySlot []balancerFlowCount
	// sweep is the last element, which belongs to no slot. Its time is that of the last sweep whose
	// counts are all stored. Its first count is a version: it is odd while the balancer stores the
	// counts of a sweep, and is higher after each sweep.
	sweep *balancerFlowCount
}

// SweptCounts are the counts of one sweep.
type SweptCounts struct {
	bySlot []balancerFlowCount
	time   uint64
}

// mapFlowCounts maps the table. The protection is PROT_READ, or PROT_READ|PROT_WRITE to change it.
func mapFlowCounts(m *ebpf.Map, protection int) (*FlowCountTable, error) {
	n := int(m.MaxEntries())
	size := n * int(unsafe.Sizeof(balancerFlowCount{}))
	memory, err := unix.Mmap(m.FD(), 0, size, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the counts of flows: %w", err)
	}
	all := unsafe.Slice((*balancerFlowCount)(unsafe.Pointer(unsafe.SliceData(memory))), n)
	return &FlowCountTable{memory, all[:n-1], &all[n-1]}, nil
}

func (t *FlowCountTable) close() error { return unix.Munmap(t.memory) }

// store stores the numbers of entries that a sweep has kept, for the slots that have a server. The
// argument kept is by slot. Slots beyond its end have no entries.
func (t *FlowCountTable) store(kept []SweptServer, slots iter.Seq[uint32]) error {
	now, err := bpfclock.Boot()
	if err != nil {
		return err
	}
	version := &t.sweep.Flows[0]
	// Odd: counts are being stored. It is odd already if a process was killed while it stored counts.
	atomic.StoreUint32(version, atomic.LoadUint32(version)|1)
	for slot := range slots {
		count := balancerFlowCount{Time: uint64(now)}
		if slot < uint32(len(kept)) {
			copy(count.Flows[:], kept[slot].Flows[:])
			// Readers see closing flows as closed: see countsOf.
			count.Flows[FlowClosed] += kept[slot].Flows[FlowClosing]
			copy(count.HalfOpen[:], kept[slot].HalfOpen[:])
		}
		t.put(slot, count)
	}
	atomic.StoreUint64(&t.sweep.Time, uint64(now))
	atomic.AddUint32(version, 1)
	return nil
}

const (
	// readAttempts is how often Read looks for a moment when the balancer does not store counts. It
	// stores them within milliseconds, every five seconds.
	readAttempts = 20
	readPause    = 5 * time.Millisecond
)

// Read reads the counts of all slots, so that they are all of one sweep. It waits while the
// balancer stores counts, but not longer than readAttempts times readPause. So if a process was
// killed while it stored counts, they can be of two sweeps until the next process sweeps.
func (t *FlowCountTable) Read() *SweptCounts {
	version := &t.sweep.Flows[0]
	for attempt := 1; ; attempt++ {
		before := atomic.LoadUint32(version)
		counts := t.copy()
		areOfOneSweep := before&1 == 0 && atomic.LoadUint32(version) == before
		if areOfOneSweep || attempt == readAttempts {
			return counts
		}
		time.Sleep(readPause)
	}
}

// copy reads the counts of all slots, which may be changed meanwhile.
func (t *FlowCountTable) copy() *SweptCounts {
	counts := &SweptCounts{make([]balancerFlowCount, len(t.bySlot)), atomic.LoadUint64(&t.sweep.Time)}
	for slot := range t.bySlot {
		from, to := &t.bySlot[slot], &counts.bySlot[slot]
		for state := range from.Flows {
			to.Flows[state] = atomic.LoadUint32(&from.Flows[state])
			to.HalfOpen[state] = atomic.LoadUint32(&from.HalfOpen[state])
		}
		to.Time = atomic.LoadUint64(&from.Time)
	}
	return counts
}

// put replaces the counts of a slot.
func (t *FlowCountTable) put(slot uint32, count balancerFlowCount) {
	at := &t.bySlot[slot]
	for state := range count.Flows {
		atomic.StoreUint32(&at.Flows[state], count.Flows[state])
		atomic.StoreUint32(&at.HalfOpen[state], count.HalfOpen[state])
	}
	atomic.StoreUint64(&at.Time, count.Time)
}

// Of returns the flows of the slot's server at the last sweep. It returns false if no sweep has
// counted the server's flows yet.
func (t *FlowCountTable) Of(slot uint32) (flows CountedFlows, ok bool) {
	at := &t.bySlot[slot]
	if atomic.LoadUint64(&at.Time) == 0 {
		return CountedFlows{}, false
	}
	return CountedFlows{countsOf(&at.Flows), countsOf(&at.HalfOpen)}, true
}

// Of returns the flows of the slot's server. It returns false if the server is newer than the
// sweep.
func (c *SweptCounts) Of(slot uint32) (flows CountedFlows, ok bool) {
	at := &c.bySlot[slot]
	if at.Time == 0 {
		return CountedFlows{}, false
	}
	return CountedFlows{countsOf(&at.Flows), countsOf(&at.HalfOpen)}, true
}

// Total returns the flows of all servers, and the time since the sweep. It returns false if there
// was no sweep yet. Total returns an error if the clock cannot be read.
func (c *SweptCounts) Total() (flows CountedFlows, age time.Duration, ok bool, err error) {
	if c.time == 0 {
		return CountedFlows{}, 0, false, nil
	}
	for slot := range c.bySlot {
		counted, _ := c.Of(uint32(slot))
		flows.Flows.add(counted.Flows)
		flows.HalfOpen.add(counted.HalfOpen)
	}
	now, err := bpfclock.Boot()
	return flows, now - time.Duration(c.time), true, err
}
