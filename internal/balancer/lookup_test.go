// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"math/bits"
	"sync/atomic"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
)

const (
	// flowMinIdle is how long an established flow must be idle, in ticks, before a new flow may
	// displace it: FLOW_MIN_IDLE in bpf/balancer/tables/flowtable.h.
	flowMinIdle = 15
	// flowLinger is how long packets of a flow that has ended can still be under way, in ticks:
	// FLOW_LINGER in bpf/balancer/tables/flowtable.h.
	flowLinger = 2
	// endedTicks is the age at which a sweep makes a closing flow silent: maxEndedTicks of the data
	// plane.
	endedTicks = 0x7ff - 2*flowMaxLead
	// flowMaxLead is how far the time of an entry can be ahead of a clock that was read earlier, in
	// ticks: FLOW_MAX_LEAD in bpf/balancer/tables/flowtable.h.
	flowMaxLead = 32
)

// flowBucket is a copy of a bucket of the flow table.
type flowBucket [dataplane.FlowsPerBucket]dataplane.FlowEntry

// find returns the entry with the signature, or 0.
func (b *flowBucket) find(signature uint64) dataplane.FlowEntry {
	for _, entry := range b {
		if entry.Signature() == signature && entry.State() != stateFree {
			return entry
		}
	}
	return 0
}

// lookUp returns a copy of the flow's bucket of the flow table, and the flow's signature.
func (f *fixture) lookUp(flow dataplane.Flow) (bucket flowBucket, signature uint64) {
	f.t.Helper()
	entries := f.bucket(flow)
	for i := range bucket {
		bucket[i] = dataplane.FlowEntry(atomic.LoadUint64(&entries[i]))
	}
	return bucket, f.signature(flow)
}

// entry looks a flow up in the flow table as the data path does. It returns 0 if the flow has no
// entry.
func (f *fixture) entry(flow dataplane.Flow) dataplane.FlowEntry {
	f.t.Helper()
	bucket, signature := f.lookUp(flow)
	return bucket.find(signature)
}

// bucketNumber returns the number of the bucket for a place, which is a result of Flow.TableHash.
func bucketNumber(t *dataplane.FlowTable, place uint64) int {
	buckets := uint64(len(t.Entries) / dataplane.FlowsPerBucket) // a power of two
	return int(place >> (64 - bits.TrailingZeros64(buckets)))
}

// ageOf returns the time since the last packet of the flow, in ticks from 0 to 4063, or to 2015 if
// the flow has ended: entry_age in bpf/balancer/tables/flowtable.h. It is 0 if a packet arrived
// after now was read.
func ageOf(e dataplane.FlowEntry, now uint16) uint16 {
	mask := timeMaskOf(e.State())
	age := (now - uint16(e)) & mask
	if age > mask-flowMaxLead {
		return 0
	}
	return age
}

// isOver tells whether the flow is over, so that no late packet can be under way: flow_is_over in
// bpf/balancer/tables/flowtable.h.
func isOver(e dataplane.FlowEntry, now uint16) bool {
	return e.State() == stateClosed && ageOf(e, now) >= flowLinger
}
