// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
)

// Flow is the 5-tuple of a flow. All packets of a flow have these addresses, ports and protocol.
type Flow struct {
	Protocol    desired.Protocol `json:"protocol"`
	Source      netip.AddrPort   `json:"source"`
	Destination netip.AddrPort   `json:"destination"`
}

// These are the types of hash keys. bpf/balancer/types.h has the numbers of their words.
type (
	// FlowKeys are the keys for the place in a flow table and for the signature: FLOW_KEYS.
	FlowKeys = [10]uint64
	// ServiceKeys are the keys for the table of services: SERVICE_WORDS. All are odd.
	ServiceKeys = [3]uint64
	// TupleKeys are the keys for the bucket of a candidate table: TUPLE_WORDS, and one more.
	TupleKeys = [11]uint64
)

// words returns the flow in the layout of struct flow_key in bpf/balancer/types.h.
func (f Flow) words() (words [10]uint32) {
	var key [40]byte
	source, destination := f.Source.Addr().As16(), f.Destination.Addr().As16()
	copy(key[0:], source[:])
	copy(key[16:], destination[:])
	binary.BigEndian.PutUint16(key[32:], f.Source.Port())
	binary.BigEndian.PutUint16(key[34:], f.Destination.Port())
	key[36] = f.Protocol.Number()
	for i := range words {
		words[i] = binary.NativeEndian.Uint32(key[4*i:])
	}
	return words
}

// Hash returns the hash of the flow that is the same on all balancers with the same keys: hash_of in
// bpf/balancer/tables/candidates.h.
func (f Flow) Hash(keys *TupleKeys) uint32 {
	return hashOf(f.words(), keys)
}

// hashOf is Hash for a flow, or a part of one, in the layout of struct flow_key.
func hashOf(words [10]uint32, keys *TupleKeys) uint32 {
	return mix(uint32(multilinear(words[:], keys[:10], keys[10]) >> 32))
}

// Bucket returns the bucket of the flow by a bucket hash, which is one of the desired ones: bucket_of
// in bpf/balancer/tables/candidates.h. The CRC does not depend on the keys.
func (f Flow) Bucket(by desired.BucketHash, keys *TupleKeys, buckets int) int {
	hash := f.Hash(keys)
	if by == desired.BucketHashCRC32 {
		hash = f.crc()
	}
	return shareOf(hash, buckets)
}

// shareOf maps a hash onto the buckets: share_of in bpf/balancer/tables/candidates.h.
func shareOf(hash uint32, buckets int) int { return int(uint64(hash) * uint64(buckets) >> 32) }

// BucketOf returns the bucket of the flow in a service, whose table has the given number of rows.
// Bucket is the same for a service without affinity.
func (f Flow) BucketOf(svc *desired.Service, keys *TupleKeys, buckets int) int {
	if a := svc.ClientAffinity(); a.IsWanted() {
		return shareOf(hashOf(f.selectingPart(a), keys), buckets)
	}
	return f.Bucket(svc.BucketHash, keys, buckets)
}

// selectingPart returns the part of the flow that selects its bucket under affinity, in the layout of
// struct flow_key, and zeros: see affine_hash in bpf/balancer/tables/affinity.h.
func (f Flow) selectingPart(a desired.ClientAffinity) [10]uint32 {
	client := a.ClientOf(f.Source.Addr().Unmap()).Addr()
	part := Flow{
		Source:      netip.AddrPortFrom(client, 0),
		Destination: netip.AddrPortFrom(f.Destination.Addr(), 0),
	}
	if !a.Shared {
		part.Destination, part.Protocol = f.Destination, f.Protocol
	}
	words := part.words()
	if a.Shared {
		words[9] = 0 // no protocol
	}
	return words
}

// crc returns the CRC-32 of the flow's addresses and ports in network order: crc_of in
// bpf/net/crc.h.
func (f Flow) crc() uint32 {
	source, destination := f.Source.Addr().As16(), f.Destination.Addr().As16()
	key := slices.Concat(source[:], destination[:])
	key = binary.BigEndian.AppendUint16(key, f.Source.Port())
	key = binary.BigEndian.AppendUint16(key, f.Destination.Port())
	return crc32.ChecksumIEEE(key)
}

// crcTables returns crc_tables of bpf/net/crc.h: table i has the CRC of each byte with i zero bytes
// behind it.
func crcTables() (t [4][256]uint32) {
	t[0] = *crc32.IEEETable
	for i := 1; i < len(t); i++ {
		for b, crc := range t[i-1] {
			t[i][b] = crc>>8 ^ t[0][byte(crc)]
		}
	}
	return t
}

// TableHash returns the place of the flow in a flow table, and the 34-bit signature of its entry.
// The highest bits of the place are the number of the flow's bucket.
func (f Flow) TableHash(service uint32, identity *Identity) (place, signature uint64) {
	return f.place(service, &identity.FlowKeys), f.signature(service, &identity.FlowKeys)
}

// hashInput returns the words of the flow that are hashed: FLOW_HASH_INPUT in
// bpf/balancer/tables/flowtable.h. These are the source address, the ports, and the service.
func (f Flow) hashInput(service uint32) []uint32 {
	words := f.words()
	return append(words[:4:4], words[8], service)
}

// place returns a hash whose highest bits select the flow's bucket in a flow table: the first of
// flow_hashes in bpf/balancer/tables/flowtable.h.
func (f Flow) place(service uint32, keys *FlowKeys) uint64 {
	return placeOf(f.placeSum(service, keys))
}

func (f Flow) placeSum(service uint32, keys *FlowKeys) uint64 {
	return multilinear(f.hashInput(service), keys[1:7], keys[0])
}

// signature returns the 34 bits that identify the flow in its bucket: the second of flow_hashes in
// bpf/balancer/tables/flowtable.h.
func (f Flow) signature(service uint32, keys *FlowKeys) uint64 {
	return multilinear(f.hashInput(service), keys[3:9], keys[9]) >> 30
}

// goldenRatio is 2^64 divided by the golden ratio (Knuth, "The Art of Computer Programming", volume
// 3, section 6.4): GOLDEN_RATIO in bpf/net/hash.h.
const goldenRatio = 0x9e3779b97f4a7c15

// spread returns the place of a key that no client chooses: spread in bpf/net/hash.h.
func spread(sum uint64) uint64 {
	sum ^= sum >> 32
	return sum * goldenRatio
}

// multilinear returns a hash of an even number of words, with as many keys, and another key that is
// added: multilinear in bpf/net/hash.h.
func multilinear(words []uint32, keys []uint64, added uint64) uint64 {
	sum := added
	for i := 0; i < len(words); i += 2 {
		sum += (keys[i] + uint64(words[i])) * (keys[i+1] + uint64(words[i+1]))
	}
	return sum
}

// placeOf returns the place of a hash, whose highest bits are the number of a bucket: place_of in
// bpf/net/hash.h.
func placeOf(sum uint64) uint64 {
	high := sum >> 32
	return sum + high*high<<33
}

// mix mixes the bits of a hash: the function of this name in bpf/net/hash.h.
func mix(hash uint32) uint32 {
	hash ^= hash >> 16
	hash *= 0x85ebca6b
	hash ^= hash >> 13
	hash *= 0xc2b2ae35
	return hash ^ hash>>16
}

// bucketKeys derives the keys for buckets from the configured seed, in the same way on all
// balancers.
func bucketKeys(seed uint64) (keys TupleKeys) {
	generator := rand.NewPCG(seed, 0x5e90e) // an arbitrary constant; a change would change all keys
	for i := range keys {
		keys[i] = generator.Uint64()
	}
	return keys
}
