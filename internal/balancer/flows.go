// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const (
	flowsPerBucket = 8
	// flowLoad is how full the table is at its stated capacity, in flows per
	// bucket: half, so that few buckets overflow (docs/flow-table.md).
	flowLoad = flowsPerBucket / 2

	// flowsPerHalfOpen is how many flows there may be for each that is half open: a client answers within
	// a round trip, and then talks for many.
	flowsPerHalfOpen = 4

	flowTimeMask = 0xfff
	// maxFlowLead is how far an entry can be ahead of a clock that was read
	// earlier, in ticks; FLOW_MAX_LEAD in bpf/balancer/flowtable.h.
	maxFlowLead = 32
	flowMinIdle = 15 // ticks; FLOW_MIN_IDLE in bpf/balancer/flowtable.h
	flowLinger  = 2  // ticks; FLOW_LINGER in bpf/balancer/flowtable.h
	// maxFlowTicks leaves the sweeper time before the clock wraps around.
	maxFlowTicks = flowTimeMask - 2*maxFlowLead
)

// flowBuckets is how many buckets hold the given number of flows: a power of two.
func flowBuckets(flows uint32) uint32 {
	needed := max(1, (uint64(flows)+flowLoad-1)/flowLoad)
	return 1 << bits.Len64(needed-1)
}

// flowTable is the kernel's flow table, mapped into this process.
type flowTable struct {
	memory  []byte
	entries []uint64
}

// mapFlows maps a flow table, for reading only when it is not to be swept.
func mapFlows(m *ebpf.Map, protection int) (*flowTable, error) {
	size := int(m.MaxEntries()) * int(m.ValueSize())
	memory, err := unix.Mmap(m.FD(), 0, size, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the flow table: %w", err)
	}
	entries := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(memory))), size/8)
	return &flowTable{memory: memory, entries: entries}, nil
}

func (t *flowTable) close() error {
	return unix.Munmap(t.memory)
}

// flowEntry is an entry of the flow table; bpf/balancer/flowtable.h has its layout.
type flowEntry uint64

func (e flowEntry) signature() uint64        { return uint64(e) >> 30 }
func (e flowEntry) server() uint32           { return uint32(e>>14) & 0xffff }
func (e flowEntry) state() balancerFlowState { return balancerFlowState(e >> 12 & 3) }

// age is the time since the flow was seen, in ticks: 0 also when a packet renewed
// the entry after now was read.
func (e flowEntry) age(now uint16) uint16 {
	age := (now - uint16(e)) & flowTimeMask
	if age > flowTimeMask-maxFlowLead {
		return 0
	}
	return age
}

// isOver tells whether an entry's connection has ended for good: flow_is_over in bpf/balancer/flowtable.h.
func (e flowEntry) isOver(now uint16) bool {
	return e.state() == balancerFlowStateFLOW_CLOSING && e.age(now) >= flowLinger
}

// String is how users see the state of a flow.
func (s balancerFlowState) String() string {
	switch s {
	case balancerFlowStateFLOW_NEW:
		return "new"
	case balancerFlowStateFLOW_ESTABLISHED:
		return "established"
	case balancerFlowStateFLOW_CLOSING:
		return "closing"
	}
	return "free"
}

// mostSlots is how many slots for servers an entry can tell apart.
const mostSlots = 1 << 16

// flowCounts counts flows by server slot and state, up to the last slot with a flow. It is no map: in a large
// table there are a hundred million flows to be counted.
type flowCounts [][4]uint64

func (c *flowCounts) add(e flowEntry) {
	if missing := int(e.server()) + 1 - len(*c); missing > 0 {
		*c = append(*c, make(flowCounts, missing)...)
	}
	(*c)[e.server()][e.state()]++
}

// sweep frees the entries that are not to be kept and counts the others. Traffic
// goes on meanwhile: an entry that changes under the sweep is left alone.
func (t *flowTable) sweep(keep func(flowEntry) bool) flowCounts {
	counts := flowCounts{}
	for i := range t.entries {
		value := atomic.LoadUint64(&t.entries[i])
		entry := flowEntry(value)
		if entry.state() == balancerFlowStateFLOW_FREE {
			continue
		}
		if !keep(entry) && atomic.CompareAndSwapUint64(&t.entries[i], value, 0) {
			continue
		}
		counts.add(entry)
	}
	return counts
}

// count counts the flows.
func (t *flowTable) count() flowCounts {
	return t.sweep(func(flowEntry) bool { return true })
}

// FlowCounts are numbers of flows by state.
type FlowCounts struct {
	New         uint64 `json:"new"`         // one packet seen
	Established uint64 `json:"established"` // more than one
	Closing     uint64 `json:"closing"`     // FIN or RST seen
}

// Total is the number of flows in any state.
func (c FlowCounts) Total() uint64 { return c.New + c.Established + c.Closing }

// of are the flows of a server.
func (c flowCounts) of(server uint32) (counts FlowCounts) {
	if server < uint32(len(c)) {
		states := &c[server]
		counts.New = states[balancerFlowStateFLOW_NEW]
		counts.Established = states[balancerFlowStateFLOW_ESTABLISHED]
		counts.Closing = states[balancerFlowStateFLOW_CLOSING]
	}
	return counts
}

// total are the flows of all servers.
func (c flowCounts) total() (total FlowCounts) {
	for server := range c {
		counts := c.of(uint32(server))
		total.New += counts.New
		total.Established += counts.Established
		total.Closing += counts.Closing
	}
	return total
}

// find looks a flow up as the data path does. No entry is zero.
func (t *flowTable) find(flow Flow, service uint32, identity *balancerIdentity) flowEntry {
	bucket, signature := t.bucket(flow, service, identity)
	return bucket.find(signature)
}

// flowBucket is a copy of a bucket of the flow table.
type flowBucket [flowsPerBucket]flowEntry

// bucket is the one that holds a flow, or would, under the signature.
func (t *flowTable) bucket(flow Flow, service uint32, identity *balancerIdentity) (bucket flowBucket, signature uint64) {
	place, signature := flow.tableHash(service, identity)
	number := t.number(place)
	for i := range bucket {
		bucket[i] = flowEntry(atomic.LoadUint64(&t.entries[number*flowsPerBucket+i]))
	}
	return bucket, signature
}

// number is that of the bucket of a place.
func (t *flowTable) number(place uint64) int {
	return int(place >> bucketShift(uint32(len(t.entries)/flowsPerBucket)))
}

// bucketShift is flow_bucket_shift of bpf/balancer/flowtable.h for a number of buckets.
func bucketShift(buckets uint32) uint32 { return 64 - uint32(bits.TrailingZeros32(buckets)) }

// find returns the flow's entry, or zero.
func (b *flowBucket) find(signature uint64) flowEntry {
	for _, entry := range b {
		if entry.signature() == signature && entry.state() != balancerFlowStateFLOW_FREE {
			return entry
		}
	}
	return 0
}

// hasRoom tells whether another flow finds room: flow_rank in bpf/balancer/flowtable.h is not 0 for one of the
// entries at least.
func (b *flowBucket) hasRoom(now uint16) bool {
	for _, entry := range b {
		if entry.state() != balancerFlowStateFLOW_ESTABLISHED || entry.age(now) >= flowMinIdle {
			return true
		}
	}
	return false
}
