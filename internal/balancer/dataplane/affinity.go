// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"net/netip"

	"github.com/segue-lb/segue/internal/desired"
)

// The parts of ServiceRule.Bucketing: BUCKETING in bpf/balancer/types.h.
const (
	affinityShift  = 25
	bucketsMask    = 1<<affinityShift - 1
	affinityPrefix = 0x3f
	affinityShared = 0x40
)

// ipv6Digit is how many bits of an IPv6 address an affinity counts as one.
const ipv6Digit = 4

// Buckets returns how many rows the service's candidate table has. 0: it has none.
func (r ServiceRule) Buckets() uint32 { return r.Bucketing & bucketsMask }

// SetBuckets sets how many rows the service's candidate table has, 0 to 2^24.
func (r *ServiceRule) SetBuckets(buckets uint32) {
	r.Bucketing = r.Bucketing&^bucketsMask | buckets
}

func (r ServiceRule) affinity() uint32 { return r.Bucketing >> affinityShift }

// affinityBits returns the affinity of a service as in ServiceRule.Bucketing.
func affinityBits(svc *desired.Service) (bits uint32) {
	a := svc.ClientAffinity()
	if !a.IsWanted() {
		return 0
	}
	left := svc.VIP.BitLen() - a.Prefix
	if !svc.VIP.Is4() {
		left /= ipv6Digit
	}
	bits = uint32(left) + 1
	if a.Shared {
		bits |= affinityShared
	}
	return bits << affinityShift
}

// Affinity returns which part of a flow to a VIP selects its bucket.
func (r ServiceRule) Affinity(vip netip.Addr) (a desired.ClientAffinity) {
	prefix := r.affinity() & affinityPrefix
	if prefix == 0 {
		return a
	}
	left := int(prefix) - 1
	if !vip.Is4() {
		left *= ipv6Digit
	}
	return desired.ClientAffinity{Prefix: vip.BitLen() - left, Shared: r.affinity()&affinityShared != 0}
}
