// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

var (
	some6 = Flow{
		Protocol: desired.TCP, Source: netip.MustParseAddrPort("[2001:db8:c::2]:40000"),
		Destination: netip.MustParseAddrPort("[2001:db8:80::1]:80"),
	}
	some4 = Flow{
		Protocol: desired.TCP, Source: netip.MustParseAddrPort("192.0.2.2:40000"),
		Destination: netip.MustParseAddrPort("198.51.100.1:80"),
	}
)

// pairs are pairs of flows that differ as little as possible, or as clients could choose them.
var pairs = map[string][2]Flow{
	"source port":     {some6, withSource(some6, "[2001:db8:c::2]:40001")},
	"high source bit": {some6, withSource(some6, "[2001:db8:c::2]:7232")},
	"protocol":        {some6, Flow{desired.UDP, some6.Source, some6.Destination}},
	"port":            {some6, withPort(some6, 81)},
	"client":          {some6, withSource(some6, "[2001:db8:c::3]:40000")},
	"client network":  {some6, withSource(some6, "[a001:db8:c::2]:40000")},
	"IPv4 client":     {some4, withSource(some4, "192.0.2.3:40000")},
	"two words":       {some6, withSource(some6, "[2001:db8:d:1::2]:40000")},

	// These flows differ only in the highest bit of a word in memory order.
	"high port bit":         {some6, withPort(some6, 80^0x80)},
	"high client bit":       {some6, withSource(some6, "[2001:db8:c::82]:40000")},
	"high IPv4 client bit":  {some4, withSource(some4, "192.0.2.130:40000")},
	"high client bits, two": {some6, withSource(some6, "[2001:d38:c::82]:40000")},
}

func withPort(flow Flow, port uint16) Flow {
	flow.Destination = netip.AddrPortFrom(flow.Destination.Addr(), port)
	return flow
}

func withSource(flow Flow, source string) Flow {
	flow.Source = netip.MustParseAddrPort(source)
	return flow
}

// differInHighBits tells whether the flows differ only in the highest bits of words in memory
// order.
func differInHighBits(pair [2]Flow) bool {
	a, b := pair[0].words(), pair[1].words()
	for i := range a {
		if (a[i]^b[i])&math.MaxInt32 != 0 {
			return false
		}
	}
	return true
}

// For random keys, the 33 highest bits of the signatures of two flows are independent and uniform.
// Each of these bits differs in half of the draws, and k of these bits are all equal in one of 2^k
// draws. The lowest bit differs in half of the draws as well, unless the flows differ only in the
// highest bits of words. In that case, it never differs (docs/understand/flow-table.md).
func TestSignatureCollisions(t *testing.T) {
	t.Parallel()
	const draws, signatureBits, bits = 1 << 16, 34, 10
	for name, pair := range pairs {
		random := rand.New(rand.NewChaCha8(sha256.Sum256([]byte(name))))
		var differ [signatureBits]int
		var low, high int
		for range draws {
			difference := signatureDifference(random, pair)
			for i := range differ {
				differ[i] += int(difference >> i & 1)
			}
			low += oneIf(difference>>1<<(64-bits) == 0)
			high += oneIf(difference>>(signatureBits-bits) == 0)
		}
		for i, n := range differ {
			share := 0.5
			if i == 0 && differInHighBits(pair) {
				share = 0
			}
			expectShare(t, name, "draws in which bit differs", i, n, draws, share)
		}
		expectShare(t, name, "collisions of the low bits", bits, low, draws, 1./(1<<bits))
		expectShare(t, name, "collisions of the high bits", bits, high, draws, 1./(1<<bits))
	}
}

// signatureDifference returns the bits in which the signatures of two flows differ, for random
// keys.
func signatureDifference(random *rand.Rand, pair [2]Flow) (difference uint64) {
	keys := drawFlowKeys(random)
	for _, flow := range pair {
		// A service has one protocol, so that the protocol can stand for the service.
		difference ^= flow.signature(uint32(flow.Protocol.Number()), &keys)
	}
	return difference
}

// clients are clients as in practice, and clients that fill buckets unevenly if a hash is weak.
var clients = map[string]func(i int) netip.AddrPort{
	"ports in turn":       func(i int) netip.AddrPort { return netip.AddrPortFrom(some6.Source.Addr(), uint16(i)) },
	"even ports":          func(i int) netip.AddrPort { return netip.AddrPortFrom(some6.Source.Addr(), uint16(2*i)) },
	"hosts of a network":  func(i int) netip.AddrPort { return clientOf(0x20010db8_000c0000, uint64(i)) },
	"networks of a site":  func(i int) netip.AddrPort { return clientOf(0x20010db8_000c0000+uint64(i), 1) },
	"sites of a provider": func(i int) netip.AddrPort { return clientOf(0x20010db8_00000000+uint64(i)<<16, 1) },
	"IPv4 hosts":          func(i int) netip.AddrPort { return clientOf(0, 0xffff_0a000000+uint64(i)) },
	"IPv4 networks":       func(i int) netip.AddrPort { return clientOf(0, 0xffff_0a000001+uint64(i)<<8) },
	"last bytes":          func(i int) netip.AddrPort { return clientOf(0x20010db8_000c0000+uint64(i&63), uint64(i>>6)) },
}

func clientOf(network, host uint64) netip.AddrPort {
	address := binary.BigEndian.AppendUint64(nil, network)
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(binary.BigEndian.AppendUint64(address, host))).Unmap(), 40000)
}

// Whatever clients have in common, their flows are spread over the buckets as if at random. At
// capacity, with four flows in a bucket on average, one flow of 120 finds eight others in its
// bucket.
func TestBucketsAreEven(t *testing.T) {
	t.Parallel()
	const bits, draws = 12, 100
	var chance float64 // the share of flows beyond the eighth of a bucket (Poisson)
	for n, p := 0, math.Exp(-4); n < 60; n++ {
		chance += p * max(0, float64(n-FlowsPerBucket)) / 4
		p *= 4 / float64(n+1)
	}
	for name, client := range clients {
		random := rand.New(rand.NewChaCha8(sha256.Sum256([]byte(name))))
		var sum, most float64
		for range draws {
			beyond := flowsBeyond(drawFlowKeys(random), bits, client)
			sum, most = sum+beyond, max(most, beyond)
		}
		if mean := sum / draws; mean > 1.1*chance || most > 2*chance {
			t.Errorf("%s: %.4f of the flows find no room, at most %.4f, want no more than about %.4f", name, mean, most, chance)
		}
	}
}

// TestChosenFlowsShareBucketsByChance: without the keys, nobody can choose flows for the bucket of
// another flow. For random keys, each other flow shares it with a probability of one to the number
// of buckets. So by Markov's inequality, eight flows of a set fill the bucket for no more than
// ClientSetSize / (8 * buckets) of the keys.
func TestChosenFlowsShareBucketsByChance(t *testing.T) {
	t.Parallel()
	const bits, draws = 10, 1000
	for name, clients := range packettest.ClientSets() {
		victim := withSource(some6, clients[0].String())
		random := rand.New(rand.NewChaCha8(sha256.Sum256([]byte(name))))
		var shared, filled int
		for range draws {
			mates := matesOf(victim, clients[1:], bits, &Identity{FlowKeys: drawFlowKeys(random)})
			shared, filled = shared+mates, filled+oneIf(mates >= FlowsPerBucket)
		}
		const chance, most = draws * packettest.ClientSetSize >> bits, draws * packettest.ClientSetSize / FlowsPerBucket >> bits
		if shared < chance*3/4 || shared > chance*5/4 || filled > most {
			t.Errorf("%s: %d flows share a victim's bucket, want about %d by chance; "+
				"they fill it for %d of %d keys, want at most %d", name, shared, chance, filled, draws, most)
		}
	}
}

// Flows with the same signature share a bucket as seldom as other flows do. The test compares the
// highest bits of the sums from which the places follow (placeOf).
func TestPlacesAndSignaturesAreIndependent(t *testing.T) {
	t.Parallel()
	const draws, placeBits, signatureBits = 1 << 16, 3, 4
	for name, pair := range pairs {
		random := rand.New(rand.NewChaCha8(sha256.Sum256([]byte(name))))
		var places, both int
		for range draws {
			keys := drawFlowKeys(random)
			var place, signature uint64
			for _, flow := range pair {
				service := uint32(flow.Protocol.Number())
				place ^= flow.placeSum(service, &keys)
				signature ^= flow.signature(service, &keys)
			}
			samePlace := place>>(64-placeBits) == 0
			places += oneIf(samePlace)
			both += oneIf(samePlace && signature>>(34-signatureBits) == 0)
		}
		expectShare(t, name, "same sums, of bits", placeBits, places, draws, 1./(1<<placeBits))
		expectShare(t, name, "the same with one signature, of bits", placeBits+signatureBits, both, draws, 1./(1<<(placeBits+signatureBits)))
	}
}

// matesOf returns how many of the clients have flows in the victim's bucket, of 2^bits buckets.
func matesOf(victim Flow, clients []netip.AddrPort, bits int, identity *Identity) (mates int) {
	own, _ := victim.TableHash(5, identity)
	for _, client := range clients {
		other := victim
		other.Source = client
		place, _ := other.TableHash(5, identity)
		mates += oneIf((place^own)>>(64-bits) == 0)
	}
	return mates
}

// flowsBeyond returns the share of flows beyond the eighth of their bucket, with four flows for
// each of 2^bits buckets.
func flowsBeyond(keys FlowKeys, bits int, client func(i int) netip.AddrPort) float64 {
	flows, count, beyond := 4<<bits, make([]int, 1<<bits), 0
	for i := range flows {
		flow := some6
		flow.Source = client(i)
		number := flow.place(5, &keys) >> (64 - bits)
		beyond += oneIf(count[number] >= FlowsPerBucket)
		count[number]++
	}
	return float64(beyond) / float64(flows)
}

func drawFlowKeys(random *rand.Rand) (keys FlowKeys) {
	for i := range keys {
		keys[i] = random.Uint64()
	}
	return keys
}

func oneIf(b bool) int {
	if b {
		return 1
	}
	return 0
}

// expectShare allows six standard deviations of a binomial distribution. The random numbers are the
// same in each run.
func expectShare(t *testing.T, name, what string, bit, got, draws int, p float64) {
	t.Helper()
	mean, deviation := float64(draws)*p, math.Sqrt(float64(draws)*p*(1-p))
	if math.Abs(float64(got)-mean) > 6*deviation {
		t.Errorf("%s: %s (%d): %d, want %.0f ± %.0f", name, what, bit, got, mean, deviation)
	}
}
