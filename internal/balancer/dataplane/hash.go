// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
)

// Flow identifies a connection: its packets have the same addresses, ports and protocol.
type Flow struct {
	Protocol    config.Protocol `json:"protocol"`
	Source      netip.AddrPort  `json:"source"`
	Destination netip.AddrPort  `json:"destination"`
}

// The keys of the hashes, with as many words as bpf/balancer/types.h says.
type (
	// PlaceKeys are of the place in a flow table: FLOW_BUCKET_WORDS. All are odd.
	PlaceKeys = [3]uint64
	// FlowKeys are of the signature in a flow table: FLOW_WORDS, and one more.
	FlowKeys = [7]uint64
	// ServiceKeys are of the table of services: SERVICE_WORDS. All are odd.
	ServiceKeys = [3]uint64
	// TupleKeys are of the bucket in a candidate table: TUPLE_WORDS, and one more.
	TupleKeys = [11]uint64
)

// words lays the flow out as struct flow_key in bpf/balancer/types.h does.
func (f Flow) words() (words [10]uint32) {
	var key [40]byte
	source, destination := f.Source.Addr().As16(), f.Destination.Addr().As16()
	copy(key[0:], source[:])
	copy(key[16:], destination[:])
	binary.BigEndian.PutUint16(key[32:], f.Source.Port())
	binary.BigEndian.PutUint16(key[34:], f.Destination.Port())
	key[36] = protocolNumber(f.Protocol)
	for i := range words {
		words[i] = binary.NativeEndian.Uint32(key[4*i:])
	}
	return words
}

// Hash returns the hash by which the flow is placed, the same on all balancers: bucket_of in
// bpf/balancer/candidates.h.
func (f Flow) Hash(keys *TupleKeys) uint32 {
	words := f.words()
	return mix(uint32(multilinear(words[:], keys[:]) >> 32))
}

// TableHash returns the place of the flow in a flow table and the 34-bit signature of its entry
// there.
func (f Flow) TableHash(service uint32, identity *Identity) (place, signature uint64) {
	return f.place(service, &identity.FlowBucketKeys), f.signature(service, &identity.FlowSignatureKeys)
}

// place tells by its highest bits the bucket of the flow table that the flow is in: flow_place in
// bpf/balancer/flowtable.h.
func (f Flow) place(service uint32, keys *PlaceKeys) uint64 {
	source := f.Source.Addr().As16()
	rest := uint64(service)<<32 | uint64(f.words()[8])
	return spread(binary.BigEndian.Uint64(source[:])*keys[0] + binary.BigEndian.Uint64(source[8:])*keys[1] + rest*keys[2])
}

// signature is the 34 bits that stand for the flow in its bucket: flow_signature in bpf/balancer/flowtable.h.
func (f Flow) signature(service uint32, keys *FlowKeys) uint64 {
	words := f.words()
	return multilinear(append(words[:4:4], words[8], service), keys[:]) >> 30
}

// goldenRatio is of 2^64: GOLDEN_RATIO in bpf/balancer/hash.h.
const goldenRatio = 0x9e3779b97f4a7c15

// spread is the function of that name in bpf/balancer/hash.h.
func spread(sum uint64) uint64 {
	sum ^= sum >> 32
	return sum * goldenRatio
}

// multilinear is the function of that name in bpf/balancer/hash.h.
func multilinear(words []uint32, keys []uint64) uint64 {
	sum := keys[len(words)]
	for i := 0; i < len(words); i += 2 {
		sum += (keys[i] + uint64(words[i])) * (keys[i+1] + uint64(words[i+1]))
	}
	return sum
}

// mix is mix in bpf/balancer/hash.h.
func mix(hash uint32) uint32 {
	hash ^= hash >> 16
	hash *= 0x85ebca6b
	hash ^= hash >> 13
	hash *= 0xc2b2ae35
	return hash ^ hash>>16
}

// bucketKeys expands the configured seed, in the same way on all balancers.
func bucketKeys(seed uint64) (keys TupleKeys) {
	generator := rand.NewPCG(seed, 0x5e90e) // any constant, for ever the same
	for i := range keys {
		keys[i] = generator.Uint64()
	}
	return keys
}

// BucketOf returns the bucket of a hash: bucket_of in bpf/balancer/candidates.h.
func BucketOf(hash, buckets uint32) uint32 {
	return uint32(uint64(hash) * uint64(buckets) >> 32)
}

func protocolNumber(p config.Protocol) uint8 {
	if p == config.UDP {
		return unix.IPPROTO_UDP
	}
	return unix.IPPROTO_TCP
}
