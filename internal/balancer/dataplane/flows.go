// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"fmt"
	"math/bits"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

const (
	// FlowsPerBucket is the number of entries of a bucket: FLOWS_PER_BUCKET in
	// bpf/balancer/tables/flowtable.h.
	FlowsPerBucket = 8
	// FlowLoad is the number of flows per bucket when the table has as many flows as its capacity.
	// It is half of the entries, so that few buckets overflow (docs/understand/flow-table.md).
	FlowLoad = FlowsPerBucket / 2

	// flowsPerHalfOpen is the assumed number of flows for each half-open flow. A flow is half-open
	// for one round trip, and lasts for many.
	flowsPerHalfOpen = 4
	// observedFlows is how many flows of services without a flow table are observed at once. They
	// take one megabyte, which fits into the second-level cache. If there are more flows, loads
	// count only some of them.
	observedFlows = 1 << 16

	// FlowTimeMask selects the bits of an entry that contain the time of the last packet, in ticks.
	FlowTimeMask = 0xfff
	// maxFlowLead is how far the time of an entry can be ahead of a clock that was read earlier, in
	// ticks: FLOW_MAX_LEAD in bpf/balancer/tables/flowtable.h.
	maxFlowLead = 32
	// maxFlowTicks is the longest timeout, in ticks. The margin gives the sweep time before the
	// clock wraps around.
	maxFlowTicks = FlowTimeMask - 2*maxFlowLead

	// FlowEndedTimeMask and FlowByClient are FLOW_ENDED_TIME_MASK and FLOW_BY_CLIENT in
	// bpf/balancer/tables/flowtable.h: the time of a flow that has ended, and the bit that says
	// that only the client has ended it.
	FlowEndedTimeMask = 0x7ff
	FlowByClient      = 0x800
	// maxEndedTicks is the highest age of a flow that has ended. If an older entry has to stay, the
	// sweep makes it silent, because the time of silent flows has more bits.
	maxEndedTicks = FlowEndedTimeMask - 2*maxFlowLead
)

// flowBuckets returns the number of buckets for a capacity in flows. It is a power of two.
func flowBuckets(flows uint32) uint32 {
	needed := max(1, (uint64(flows)+FlowLoad-1)/FlowLoad)
	return 1 << bits.Len64(needed-1)
}

// FlowTable is a flow table of the data path, mapped into this process.
type FlowTable struct {
	memory []byte
	// Entries are the entries of all buckets, FlowsPerBucket each. FlowEntry has their layout. The
	// data path changes entries at any time, so access must be atomic.
	Entries []uint64
}

// mapFlows maps a flow table into memory. A start that fails restores entries, so the table can
// also be written.
func mapFlows(m *ebpf.Map) (*FlowTable, error) {
	const protection = unix.PROT_READ | unix.PROT_WRITE
	size := int(m.MaxEntries()) * int(m.ValueSize())
	memory, err := unix.Mmap(m.FD(), 0, size, protection, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map a table of flows: %w", err)
	}
	entries := unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(memory))), size/8)
	return &FlowTable{memory: memory, Entries: entries}, nil
}

func (t *FlowTable) close() error {
	return unix.Munmap(t.memory)
}

// FlowEntry is an entry of the flow table. Its layout is described in
// bpf/balancer/tables/flowtable.h.
type FlowEntry uint64

// Signature returns the 34 bits that identify the flow in its bucket.
func (e FlowEntry) Signature() uint64 { return uint64(e) >> 30 }

// Server returns the slot of the flow's server.
func (e FlowEntry) Server() uint32 { return uint32(e>>14) & 0xffff }

// State returns the state of the flow. FlowFree means that the entry has no flow.
func (e FlowEntry) State() FlowState {
	state := FlowState(e >> 12 & 3)
	switch {
	case state == 0 && e != 0: // a free entry is 0 as a whole
		return FlowSilent
	case state == FlowClosed && e&FlowByClient != 0: // only the client has ended the flow
		return FlowClosing
	}
	return state
}

// String returns the name of the state, as output shows it.
func (s FlowState) String() string {
	switch s {
	case FlowNew:
		return "new"
	case FlowEstablished:
		return "established"
	case FlowSilent:
		return "silent"
	case FlowClosing:
		return "closing"
	case FlowClosed:
		return "closed"
	}
	return "free"
}

// bucketShift is flow_bucket_shift of bpf/balancer/tables/flowtable.h for a number of buckets.
func bucketShift(buckets uint32) uint32 { return 64 - uint32(bits.TrailingZeros32(buckets)) }
