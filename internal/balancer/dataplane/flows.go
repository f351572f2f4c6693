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
	FlowsPerBucket = 8
	// FlowLoad is how full the table is at its stated capacity, in flows per
	// bucket: half, so that few buckets overflow (docs/flow-table.md).
	FlowLoad = FlowsPerBucket / 2

	// flowsPerHalfOpen is how many flows there may be for each that is half open: a client answers within
	// a round trip, and then talks for many.
	flowsPerHalfOpen = 4

	FlowTimeMask = 0xfff
	// maxFlowLead is how far an entry can be ahead of a clock that was read
	// earlier, in ticks; FLOW_MAX_LEAD in bpf/balancer/flowtable.h.
	maxFlowLead = 32
	FlowMinIdle = 15 // ticks; FLOW_MIN_IDLE in bpf/balancer/flowtable.h
	FlowLinger  = 2  // ticks; FLOW_LINGER in bpf/balancer/flowtable.h
	// maxFlowTicks leaves the sweeper time before the clock wraps around.
	maxFlowTicks = FlowTimeMask - 2*maxFlowLead
)

// flowBuckets is how many buckets hold the given number of flows: a power of two.
func flowBuckets(flows uint32) uint32 {
	needed := max(1, (uint64(flows)+FlowLoad-1)/FlowLoad)
	return 1 << bits.Len64(needed-1)
}

// FlowTable is the kernel's flow table, mapped into this process.
type FlowTable struct {
	memory  []byte
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

func (e FlowEntry) Signature() uint64 { return uint64(e) >> 30 }
func (e FlowEntry) Server() uint32    { return uint32(e>>14) & 0xffff }
func (e FlowEntry) State() FlowState  { return FlowState(e >> 12 & 3) }

// Age is the time since the flow was seen, in ticks: 0 also when a packet renewed
// the entry after now was read.
func (e FlowEntry) Age(now uint16) uint16 {
	age := (now - uint16(e)) & FlowTimeMask
	if age > FlowTimeMask-maxFlowLead {
		return 0
	}
	return age
}

// IsOver tells whether an entry's connection has ended for good: flow_is_over in bpf/balancer/flowtable.h.
func (e FlowEntry) IsOver(now uint16) bool {
	return e.State() == FlowClosing && e.Age(now) >= FlowLinger
}

// String is how users see the state of a flow.
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

// FlowCountsBySlot counts flows by server slot and state, up to the last slot with a flow. It is no map: in a large
// table there are a hundred million flows to be counted.
type FlowCountsBySlot [][4]uint64

func (c *FlowCountsBySlot) add(e FlowEntry) {
	if missing := int(e.Server()) + 1 - len(*c); missing > 0 {
		*c = append(*c, make(FlowCountsBySlot, missing)...)
	}
	(*c)[e.Server()][e.State()]++
}

// Sweep frees the entries that are not to be kept and counts the others. Traffic
// goes on meanwhile: an entry that changes under the sweep is left alone.
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

// Count counts the flows.
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

// Of are the flows of a server.
func (c FlowCountsBySlot) Of(server uint32) (counts FlowCounts) {
	if server < uint32(len(c)) {
		states := &c[server]
		counts.New = states[FlowNew]
		counts.Established = states[FlowEstablished]
		counts.Closing = states[FlowClosing]
	}
	return counts
}

// Total are the flows of all servers.
func (c FlowCountsBySlot) Total() (total FlowCounts) {
	for server := range c {
		counts := c.Of(uint32(server))
		total.New += counts.New
		total.Established += counts.Established
		total.Closing += counts.Closing
	}
	return total
}

// Find looks a flow up as the data path does. No entry is zero.
func (t *FlowTable) Find(flow Flow, service uint32, identity *Identity) FlowEntry {
	bucket, signature := t.Bucket(flow, service, identity)
	return bucket.Find(signature)
}

// FlowBucket is a copy of a bucket of the flow table.
type FlowBucket [FlowsPerBucket]FlowEntry

// Bucket is the one that holds a flow, or would, under the signature.
func (t *FlowTable) Bucket(flow Flow, service uint32, identity *Identity) (bucket FlowBucket, signature uint64) {
	place, signature := flow.TableHash(service, identity)
	number := t.BucketNumber(place)
	for i := range bucket {
		bucket[i] = FlowEntry(atomic.LoadUint64(&t.Entries[number*FlowsPerBucket+i]))
	}
	return bucket, signature
}

// BucketNumber is that of the bucket of a place.
func (t *FlowTable) BucketNumber(place uint64) int {
	return int(place >> bucketShift(uint32(len(t.Entries)/FlowsPerBucket)))
}

// bucketShift is flow_bucket_shift of bpf/balancer/flowtable.h for a number of buckets.
func bucketShift(buckets uint32) uint32 { return 64 - uint32(bits.TrailingZeros32(buckets)) }

// Find returns the flow's entry, or zero.
func (b *FlowBucket) Find(signature uint64) FlowEntry {
	for _, entry := range b {
		if entry.Signature() == signature && entry.State() != FlowFree {
			return entry
		}
	}
	return 0
}

// HasRoom tells whether another flow finds room: flow_rank in bpf/balancer/flowtable.h is not 0 for one of the
// entries at least.
func (b *FlowBucket) HasRoom(now uint16) bool {
	for _, entry := range b {
		if entry.State() != FlowEstablished || entry.Age(now) >= FlowMinIdle {
			return true
		}
	}
	return false
}
