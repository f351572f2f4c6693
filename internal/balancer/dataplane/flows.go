// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const (
	// FlowsPerBucket is how many entries a bucket has; FLOWS_PER_BUCKET in
	// bpf/balancer/flowtable.h.
	FlowsPerBucket = 8
	// FlowLoad is how full the table is at its stated capacity, in flows per bucket: half, so
	// that few buckets overflow (docs/flow-table.md).
	FlowLoad = FlowsPerBucket / 2

	// flowsPerHalfOpen is how many flows there may be for each that is half open: a client answers within
	// a round trip, and then talks for many.
	flowsPerHalfOpen = 4

	// FlowTimeMask has the bits of an entry that say when the flow was seen, in ticks.
	FlowTimeMask = 0xfff
	// maxFlowLead is how far an entry can be ahead of a clock that was read
	// earlier, in ticks; FLOW_MAX_LEAD in bpf/balancer/flowtable.h.
	maxFlowLead = 32
	// FlowMinIdle is how long, in ticks, an established flow is idle before a new one may take its
	// entry; FLOW_MIN_IDLE in bpf/balancer/flowtable.h.
	FlowMinIdle = 15
	// FlowLinger is how long, in ticks, packets of a closing flow can still be on their way;
	// FLOW_LINGER in bpf/balancer/flowtable.h.
	FlowLinger = 2
	// maxFlowTicks leaves the sweeper time before the clock wraps around.
	maxFlowTicks = FlowTimeMask - 2*maxFlowLead
)

// flowBuckets is how many buckets hold the given number of flows: a power of two.
func flowBuckets(flows uint32) uint32 {
	needed := max(1, (uint64(flows)+FlowLoad-1)/FlowLoad)
	return 1 << bits.Len64(needed-1)
}

// FlowTable is a flow table of the data path, mapped into this process.
type FlowTable struct {
	memory []byte
	// Entries are those of all buckets, FlowsPerBucket each; FlowEntry has the layout. The data
	// path changes them at any time, so access is atomic.
	Entries []uint64
}

// mapFlows maps a flow table, for reading only when it is not to be swept.
func mapFlows(m *ebpf.Map, protection int) (*FlowTable, error) {
	size := int(m.MaxEntries()) * int(m.ValueSize())
	memory, err := unix.Mmap(m.FD(), 0, size, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the flow table: %w", err)
	}
	entries := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(memory))), size/8)
	return &FlowTable{memory: memory, Entries: entries}, nil
}

func (t *FlowTable) close() error {
	return unix.Munmap(t.memory)
}

// FlowEntry is an entry of the flow table; bpf/balancer/flowtable.h has its layout.
type FlowEntry uint64

// Signature returns the 34 bits that stand for the flow in its bucket.
func (e FlowEntry) Signature() uint64 { return uint64(e) >> 30 }

// Server returns the slot of the flow's server.
func (e FlowEntry) Server() uint32 { return uint32(e>>14) & 0xffff }

// State returns the state of the flow. FlowFree: the entry has no flow.
func (e FlowEntry) State() FlowState { return FlowState(e >> 12 & 3) }

// Age returns the time since the last packet of the flow, in ticks from 0 to 4063. It is 0 if a
// packet came after now was read.
func (e FlowEntry) Age(now uint16) uint16 {
	age := (now - uint16(e)) & FlowTimeMask
	if age > FlowTimeMask-maxFlowLead {
		return 0
	}
	return age
}

// IsOver tells whether the connection has ended for good: flow_is_over in
// bpf/balancer/flowtable.h.
func (e FlowEntry) IsOver(now uint16) bool {
	return e.State() == FlowClosing && e.Age(now) >= FlowLinger
}

// String returns the name that users see.
func (s FlowState) String() string {
	switch s {
	case FlowNew:
		return "new"
	case FlowEstablished:
		return "established"
	case FlowClosing:
		return "closing"
	}
	return "free"
}

// MostSlots is how many slots for servers an entry can tell apart.
const MostSlots = 1 << 16

// FlowCountsBySlot counts flows by slot and state, up to the last slot that has a flow. A slice
// is faster than a map: a large table has a hundred million flows.
type FlowCountsBySlot [][4]uint64

func (c *FlowCountsBySlot) add(e FlowEntry) {
	if missing := int(e.Server()) + 1 - len(*c); missing > 0 {
		*c = append(*c, make(FlowCountsBySlot, missing)...)
	}
	(*c)[e.Server()][e.State()]++
}

// Sweep frees the entries that keep does not want, and counts the others. Traffic goes on
// meanwhile: an entry that changes during the sweep stays.
func (t *FlowTable) Sweep(keep func(FlowEntry) bool) FlowCountsBySlot {
	counts := FlowCountsBySlot{}
	for i := range t.Entries {
		value := atomic.LoadUint64(&t.Entries[i])
		entry := FlowEntry(value)
		if entry.State() == FlowFree {
			continue
		}
		if !keep(entry) && atomic.CompareAndSwapUint64(&t.Entries[i], value, 0) {
			continue
		}
		counts.add(entry)
	}
	return counts
}

// Count counts the flows. It reads the whole table.
func (t *FlowTable) Count() FlowCountsBySlot {
	return t.Sweep(func(FlowEntry) bool { return true })
}

// FlowCounts are numbers of flows by state.
type FlowCounts struct {
	New         uint64 `json:"new"`         // one packet seen
	Established uint64 `json:"established"` // more than one
	Closing     uint64 `json:"closing"`     // FIN or RST seen
}

// Total is the number of flows in any state.
func (c FlowCounts) Total() uint64 { return c.New + c.Established + c.Closing }

// Of returns the flows of a slot's server.
func (c FlowCountsBySlot) Of(server uint32) (counts FlowCounts) {
	if server < uint32(len(c)) {
		states := &c[server]
		counts.New = states[FlowNew]
		counts.Established = states[FlowEstablished]
		counts.Closing = states[FlowClosing]
	}
	return counts
}

// Total returns the flows of all servers.
func (c FlowCountsBySlot) Total() (total FlowCounts) {
	for server := range c {
		counts := c.Of(uint32(server))
		total.New += counts.New
		total.Established += counts.Established
		total.Closing += counts.Closing
	}
	return total
}

// Find looks a flow up as the data path does. It returns 0 for a flow that has no entry.
func (t *FlowTable) Find(flow Flow, service uint32, identity *Identity) FlowEntry {
	bucket, signature := t.Bucket(flow, service, identity)
	return bucket.Find(signature)
}

// FlowBucket is a copy of a bucket of the flow table.
type FlowBucket [FlowsPerBucket]FlowEntry

// Bucket returns a copy of the bucket that a flow's entry is in or would be in, and the flow's
// signature.
func (t *FlowTable) Bucket(flow Flow, service uint32, identity *Identity) (bucket FlowBucket, signature uint64) {
	place, signature := flow.TableHash(service, identity)
	number := t.BucketNumber(place)
	for i := range bucket {
		bucket[i] = FlowEntry(atomic.LoadUint64(&t.Entries[number*FlowsPerBucket+i]))
	}
	return bucket, signature
}

// BucketNumber returns the number of the bucket for a place (Flow.TableHash).
func (t *FlowTable) BucketNumber(place uint64) int {
	return int(place >> bucketShift(uint32(len(t.Entries)/FlowsPerBucket)))
}

// bucketShift is flow_bucket_shift of bpf/balancer/flowtable.h for a number of buckets.
func bucketShift(buckets uint32) uint32 { return 64 - uint32(bits.TrailingZeros32(buckets)) }

// Find returns the entry with the signature, or 0.
func (b *FlowBucket) Find(signature uint64) FlowEntry {
	for _, entry := range b {
		if entry.Signature() == signature && entry.State() != FlowFree {
			return entry
		}
	}
	return 0
}

// HasRoom tells whether a new flow gets an entry: flow_rank in bpf/balancer/flowtable.h is
// above 0 for one of the bucket's entries.
func (b *FlowBucket) HasRoom(now uint16) bool {
	for _, entry := range b {
		if entry.State() != FlowEstablished || entry.Age(now) >= FlowMinIdle {
			return true
		}
	}
	return false
}
