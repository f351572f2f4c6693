// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/packet"
)

// anyFlow is a flow to one of the VIPs, from any client.
func anyFlow(vips ...netip.Addr) *rapid.Generator[Flow] {
	return rapid.Custom(func(t *rapid.T) Flow {
		vip := rapid.SampledFrom(vips).Draw(t, "vip")
		source := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "source")))
		if vip.Is6() {
			source = netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "source")))
		}
		return Flow{
			Protocol:    rapid.SampledFrom([]config.Protocol{config.TCP, config.UDP}).Draw(t, "protocol"),
			Source:      netip.AddrPortFrom(source, rapid.Uint16().Draw(t, "source port")),
			Destination: netip.AddrPortFrom(vip, rapid.Uint16().Draw(t, "port")),
		}
	})
}

// The data path and this process agree for every flow on bucket, signature and candidate: a flow is
// found where the one entered it, on the server that the other names.
func TestHashesAgree(t *testing.T) {
	t.Parallel()
	var servers []config.Server
	for i := range uint8(20) {
		servers = append(servers, srv6Server(string(rune('a'+i)), i+1, 1))
	}
	names := map[Flow]string{}
	name := func(vip netip.Addr, protocol config.Protocol) string {
		return names[Flow{Protocol: protocol, Destination: netip.AddrPortFrom(vip, 0)}]
	}
	var services []config.Service
	for _, vip := range []netip.Addr{vip4, vip6} {
		for _, protocol := range []config.Protocol{config.TCP, config.UDP} {
			svc := serviceOf("all "+vip.String()+string(protocol), vip, config.AllPorts, protocol, config.SRv6Encap, servers...)
			services = append(services, svc)
			names[Flow{Protocol: protocol, Destination: netip.AddrPortFrom(vip, 0)}] = svc.Name
		}
	}
	cfg := balancerOf(services...)
	cfg.Node.Limits = config.Limits{Flows: 1 << 16, Servers: 128}
	f := open(t, cfg)
	rapid.Check(t, func(t *rapid.T) {
		flow := anyFlow(vip4, vip6).Draw(t, "flow")
		clear(f.bucket(flow))
		service := name(flow.Destination.Addr(), flow.Protocol)
		server := f.placed(flow, service)
		f.check(f.forwarded(flow.frame(), flow, service, server, "forward_new"), f.run(flow.frame()))
		if f.t.Failed() {
			t.Fatalf("flow %+v", flow)
		}
		f.isEntered(flow, service, server, stateNew)
	})
}

// pairs of flows that differ as little as flows can, or as clients would choose them.
var pairs = map[string][2]Flow{
	"source port":     {web, web.from(40001)},
	"high source bit": {web, web.from(40000 ^ 0x8000)},
	"protocol":        {web, flowTo(vip6, 80, config.UDP)},
	"port":            {web, flowTo(vip6, 81, config.TCP)},
	"client":          {web, withSource(web, "[2001:db8:c::3]:40000")},
	"client network":  {web, withSource(web, "[a001:db8:c::2]:40000")},
	"IPv4 client":     {web4, withSource(web4, "192.0.2.3:40000")},
	"two words":       {web, withSource(web, "[2001:db8:d:1::2]:40000")},

	// In nothing but the highest bit of a word, as it is in memory.
	"high port bit":         {web, flowTo(vip6, 80^0x80, config.TCP)},
	"high client bit":       {web, withSource(web, "[2001:db8:c::82]:40000")},
	"high IPv4 client bit":  {web4, withSource(web4, "192.0.2.130:40000")},
	"high client bits, two": {web, withSource(web, "[2001:d38:c::82]:40000")},
}

func withSource(flow Flow, source string) Flow {
	flow.Source = netip.MustParseAddrPort(source)
	return flow
}

// differInHighBits tells whether no bit of a word but the highest differs: words as they are in memory.
func differInHighBits(pair [2]Flow) bool {
	a, b := pair[0].words(), pair[1].words()
	for i := range a {
		if (a[i]^b[i])&math.MaxInt32 != 0 {
			return false
		}
	}
	return true
}

// For keys drawn at random, the 33 highest bits of the signatures of two flows are independent and uniform: each
// differs half of the time, and of k bits all are alike once in 2^k draws. So does the lowest, but for flows that differ in
// nothing but the highest bits of words, where it never does (docs/flow-table.md).
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
			within(t, name, "draws in which bit differs", i, n, draws, share)
		}
		within(t, name, "collisions of the low bits", bits, low, draws, 1./(1<<bits))
		within(t, name, "collisions of the high bits", bits, high, draws, 1./(1<<bits))
	}
}

// signatureDifference is where the signatures of two flows differ, for fresh keys.
func signatureDifference(random *rand.Rand, pair [2]Flow) (difference uint64) {
	var keys flowKeys
	for i := range keys {
		keys[i] = random.Uint64()
	}
	for _, flow := range pair {
		difference ^= flow.signature(uint32(protocolNumber(flow.Protocol)), &keys) // a service has one protocol
	}
	return difference
}

// clients are flows as they come in practice, and such as fill buckets unevenly where a hash is weak.
var clients = map[string]func(i int) netip.AddrPort{
	"ports in turn":       func(i int) netip.AddrPort { return netip.AddrPortFrom(client6.Addr(), uint16(i)) },
	"even ports":          func(i int) netip.AddrPort { return netip.AddrPortFrom(client6.Addr(), uint16(2*i)) },
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

// Whatever clients have in common, their flows fill buckets as if by chance: at capacity, with four flows in
// a bucket on average, one in a hundred and twenty finds eight others there.
func TestBucketsAreEven(t *testing.T) {
	t.Parallel()
	const bits, draws = 12, 100
	var chance float64 // of a flow to be beyond the eighth of its bucket: Poisson's distribution
	for n, p := 0, math.Exp(-4); n < 60; n++ {
		chance += p * max(0, float64(n-flowsPerBucket)) / 4
		p *= 4 / float64(n+1)
	}
	for name, client := range clients {
		random := rand.New(rand.NewChaCha8(sha256.Sum256([]byte(name))))
		var sum, most float64
		for range draws {
			beyond := flowsBeyond(randomPlaceKeys(random), bits, client)
			sum, most = sum+beyond, max(most, beyond)
		}
		if mean := sum / draws; mean > 1.1*chance || most > 2*chance {
			t.Errorf("%s: %.4f of the flows find no room, at most %.4f, want no more than about %.4f", name, mean, most, chance)
		}
	}
}

// flowsBeyond is the share of flows that are beyond the eighth of their bucket, of four in each of 2^bits.
func flowsBeyond(keys placeKeys, bits int, client func(i int) netip.AddrPort) float64 {
	flows, count, beyond := 4<<bits, make([]int, 1<<bits), 0
	for i := range flows {
		flow := web
		flow.Source = client(i)
		number := flow.place(5, &keys) >> (64 - bits)
		beyond += oneIf(count[number] >= flowsPerBucket)
		count[number]++
	}
	return float64(beyond) / float64(flows)
}

func randomPlaceKeys(random *rand.Rand) (keys placeKeys) {
	for i := range keys {
		keys[i] = random.Uint64() | 1
	}
	return keys
}

func oneIf(b bool) int {
	if b {
		return 1
	}
	return 0
}

// within allows six standard deviations of a binomial distribution; the draws are the same each time.
func within(t *testing.T, name, what string, bit, got, draws int, p float64) {
	t.Helper()
	mean, deviation := float64(draws)*p, math.Sqrt(float64(draws)*p*(1-p))
	if math.Abs(float64(got)-mean) > 6*deviation {
		t.Errorf("%s: %s (%d): %d, want %.0f ± %.0f", name, what, bit, got, mean, deviation)
	}
}

// rekey starts the balancer anew with other keys for the flow table.
func (f *fixture) rekey(bucket placeKeys, signature flowKeys) {
	f.t.Helper()
	identity := f.identity
	identity.FlowBucketKeys, identity.FlowSignatureKeys = bucket, signature
	f.must(f.kernel.objects.Identity.Put(uint32(0), &identity))
	cfg := f.cfg
	f.stop()
	f.start(cfg)
}

// ignoreDestinations gives two flows of one client and port the same bucket and signature.
func (f *fixture) ignoreDestinations(a, b Flow) {
	f.t.Helper()
	// The product of ports and service is zero for both, by one factor or the other.
	f.rekey(placeKeys{1, 1, 0}, flowKeys{4: -uint64(b.words()[8]), 5: -uint64(f.serviceID(a))})
	if f.signature(a) != f.signature(b) || &f.bucket(a)[0] != &f.bucket(b)[0] {
		f.t.Fatal("the keys tell destinations apart")
	}
}

// Two flows of one service with the same signature are served by one server.
func TestSharedSignature(t *testing.T) {
	t.Parallel()
	server := []config.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)}
	f := open(t, balancerOf(serviceOf("all", vip6, config.AllPorts, config.TCP, config.SRv6Encap, server...)))
	a, b := flowTo(vip6, 80, config.TCP), flowTo(vip6, 81, config.TCP)
	f.ignoreDestinations(a, b)
	other := f.otherThanPlaced(b, "all")
	f.enter(a, "all", other, stateEstablished)
	f.check(f.forwarded(b.frame(), b, "all", other, "forward_known"), f.run(b.frame()))
}

// Two flows of different services with the same signature never meet: each is placed where its own
// service says, every time.
func TestSharedSignatureOfTwoServices(t *testing.T) {
	t.Parallel()
	two := slices.DeleteFunc(standard().Services, func(s config.Service) bool { return s.Name != "web" && s.Name != "insert" })
	f := open(t, balancerOf(two...))
	f.ignoreDestinations(web, insert)
	for range 3 {
		for _, flags := range []packet.TCPFlags{packet.SYN, packet.ACK} {
			for flow, service := range map[Flow]string{web: "web", insert: "insert"} {
				got := f.run(flow.frame(packet.Flags(flags)))
				if want := service + "/" + f.placed(flow, service); serverOf(got) != want {
					t.Errorf("%v with %#x went to %s, want %s", flow, flags, serverOf(got), want)
				}
			}
		}
	}
}
