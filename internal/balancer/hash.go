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

// hashKeys are the keys of hash_flow in bpf/hash.h.
type hashKeys = [11]uint64

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

// hash is hash_flow in bpf/hash.h.
func (f Flow) hash(keys *hashKeys) uint32 {
	words := f.words()
	sum := keys[len(words)]
	for i := 0; i < len(words); i += 2 {
		sum += (keys[i] + uint64(words[i])) * (keys[i+1] + uint64(words[i+1]))
	}
	return mix(uint32(sum >> 32))
}

// mix is mix in bpf/hash.h.
func mix(hash uint32) uint32 {
	hash ^= hash >> 16
	hash *= 0x85ebca6b
	hash ^= hash >> 13
	hash *= 0xc2b2ae35
	return hash ^ hash>>16
}

// bucketKeys expands the configured seed, in the same way on all balancers.
func bucketKeys(seed uint64) (keys hashKeys) {
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
