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

	"github.com/segue-lb/segue/internal/kernelclock"
)

// FlowCounts are numbers of flows by state.
type FlowCounts struct {
	New         uint64 `json:"new"`         // one packet was seen
	Established uint64 `json:"established"` // more than one packet was seen
	Silent      uint64 `json:"silent"`      // likewise, but no packet for a while (timeouts.silent)
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

// countsOf returns numbers of flows that are given by state. They may be changed meanwhile. Closing
// flows are counted as closed (COUNTED_FLOW_STATES in bpf/balancer/flowtable.h).
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

// FlowCountTable is the table flow_counts of bpf/balancer/maps.h, mapped into this process. It
// contains the numbers of flows that the last sweep has counted, by slot. The balancer writes it
// after each sweep. Readers can read it meanwhile, and then get some counts of the sweep before.
type FlowCountTable struct {
	memory []byte
	bySlot []balancerFlowCount
	// sweep belongs to no slot. Its time is that of the last sweep whose counts are all stored.
	sweep *balancerFlowCount
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
	now, err := kernelclock.Boot()
	if err != nil {
		return err
	}
	for slot := range slots {
		count := balancerFlowCount{Time: uint64(now)}
		if slot < uint32(len(kept)) {
			copy(count.Flows[:], kept[slot].Flows[:])
			count.Flows[FlowClosed] += kept[slot].Flows[FlowClosing]
			copy(count.HalfOpen[:], kept[slot].HalfOpen[:])
		}
		t.put(slot, count)
	}
	atomic.StoreUint64(&t.sweep.Time, uint64(now))
	return nil
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

// Total returns the flows of all servers at the last sweep, and the time since that sweep. It
// returns false if there was no sweep yet. Total returns an error if the clock cannot be read.
func (t *FlowCountTable) Total() (flows CountedFlows, age time.Duration, ok bool, err error) {
	then := atomic.LoadUint64(&t.sweep.Time)
	if then == 0 {
		return CountedFlows{}, 0, false, nil
	}
	for slot := range t.bySlot {
		counted, _ := t.Of(uint32(slot))
		flows.Flows.add(counted.Flows)
		flows.HalfOpen.add(counted.HalfOpen)
	}
	now, err := kernelclock.Boot()
	return flows, now - time.Duration(then), true, err
}
