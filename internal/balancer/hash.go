package balancer

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
)

// Flow is what tells the packets of one connection from all others.
type Flow struct {
	Protocol    config.Protocol `json:"protocol"`
	Source      netip.AddrPort  `json:"source"`
	Destination netip.AddrPort  `json:"destination"`
}

// Keys of the hashes.
type (
	flowKeys    = [7]uint64  // FLOW_WORDS in bpf/types.h, and one more
	serviceKeys = [3]uint64  // SERVICE_WORDS
	tupleKeys   = [11]uint64 // TUPLE_WORDS, and one more
)

// words lays the flow out as struct flow_key in bpf/types.h does.
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

// hash is what the flow is placed by, the same on all balancers: bucket_of in bpf/place.h.
func (f Flow) hash(keys *tupleKeys) uint32 {
	words := f.words()
	return mix(multilinear(words[:], keys[:]))
}

// tableHash is the flow's place in the flow table, whose highest bits are a bucket's number, and the 34
// bits that stand for it there: flow_hash in bpf/flowtable.h.
func (f Flow) tableHash(service uint32, identity *balancerIdentity) (place uint32, signature uint64) {
	words := f.words()
	key := append(words[:4:4], words[8], service)
	place = halfMix(multilinear(key, identity.FlowBucketKeys[:]))
	check := multilinear(key, identity.FlowSignatureKeys[:])
	return place, uint64(check)<<2 | uint64(place&3)
}

// multilinear is the function of that name in bpf/hash.h.
func multilinear(words []uint32, keys []uint64) uint32 {
	sum := keys[len(words)]
	for i := 0; i < len(words); i += 2 {
		sum += (keys[i] + uint64(words[i])) * (keys[i+1] + uint64(words[i+1]))
	}
	return uint32(sum >> 32)
}

// mix is mix in bpf/hash.h.
func mix(hash uint32) uint32 {
	hash = halfMix(hash)
	hash ^= hash >> 13
	hash *= 0xc2b2ae35
	return hash ^ hash>>16
}

// halfMix is half_mix in bpf/hash.h.
func halfMix(hash uint32) uint32 {
	hash ^= hash >> 16
	return hash * 0x85ebca6b
}

// bucketKeys expands the configured seed, in the same way on all balancers.
func bucketKeys(seed uint64) (keys tupleKeys) {
	generator := rand.NewPCG(seed, 0x5e90e) // any constant, for ever the same
	for i := range keys {
		keys[i] = generator.Uint64()
	}
	return keys
}

// bucketOf is bucket_of in bpf/place.h.
func bucketOf(hash, buckets uint32) uint32 {
	return uint32(uint64(hash) * uint64(buckets) >> 32)
}

func protocolNumber(p config.Protocol) uint8 {
	if p == config.UDP {
		return unix.IPPROTO_UDP
	}
	return unix.IPPROTO_TCP
}
