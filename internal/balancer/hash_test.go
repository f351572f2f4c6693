package balancer

import (
	"crypto/sha256"
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
}

func withSource(flow Flow, source string) Flow {
	flow.Source = netip.MustParseAddrPort(source)
	return flow
}

// For keys drawn at random, the hashes of two flows are independent and uniform: each bit differs
// half of the time, and reduced to k bits they collide once in 2^k draws (docs/flow-table.md).
func TestCollisions(t *testing.T) {
	t.Parallel()
	const draws, bits = 1 << 16, 10
	for name, pair := range pairs {
		seed := sha256.Sum256([]byte(name))
		random := rand.New(rand.NewChaCha8(seed))
		var differ [32]int
		var low, high, joint int
		for range draws {
			place, signature := hashDifferences(random, pair)
			for i := range differ {
				differ[i] += int(place >> i & 1)
			}
			low += oneIf(place<<(32-bits) == 0)
			high += oneIf(place>>(32-bits) == 0)
			joint += oneIf(place>>(32-bits/2) == 0 && signature<<(32-bits/2) == 0)
		}
		for i, n := range differ {
			within(t, name, "draws in which bit differs", i, n, draws, 0.5)
		}
		within(t, name, "collisions of the low bits", bits, low, draws, 1./(1<<bits))
		within(t, name, "collisions of the high bits", bits, high, draws, 1./(1<<bits))
		within(t, name, "collisions of half of each hash", bits, joint, draws, 1./(1<<bits))
	}
}

// hashDifferences is where the two hashes of two flows differ, for fresh keys.
func hashDifferences(random *rand.Rand, pair [2]Flow) (place, signature uint32) {
	var identity balancerIdentity
	for i := range identity.FlowBucketKeys {
		identity.FlowBucketKeys[i], identity.FlowSignatureKeys[i] = random.Uint64(), random.Uint64()
	}
	for _, flow := range pair {
		service := uint32(protocolNumber(flow.Protocol)) // a service has one protocol
		p, s := flow.tableHash(service, &identity)
		place, signature = place^p, signature^uint32(s>>2)
	}
	return place, signature
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
func (f *fixture) rekey(bucket, signature flowKeys) {
	f.t.Helper()
	identity := f.identity
	identity.FlowBucketKeys, identity.FlowSignatureKeys = bucket, signature
	f.must(f.kernel.objects.Identity.Put(uint32(0), &identity))
	cfg := f.cfg
	f.stop()
	f.start(cfg)
}

// ignoreDestinations gives all flows from the client's address to the first two services the same
// bucket and signature.
func (f *fixture) ignoreDestinations() {
	f.t.Helper()
	// All other products are zero, or one factor is: at most the ports times 1, too little for a hash.
	keys := flowKeys{0: -uint64(web.words()[0])}
	f.rekey(keys, keys)
	if f.signature(web) != f.signature(insert) || &f.bucket(web)[0] != &f.bucket(insert)[0] {
		f.t.Fatal("the keys tell destinations apart")
	}
}

// Two flows of one service with the same signature are served by one server.
func TestSharedSignature(t *testing.T) {
	t.Parallel()
	server := []config.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)}
	f := open(t, balancerOf(serviceOf("all", vip6, config.AllPorts, config.TCP, config.SRv6Encap, server...)))
	f.ignoreDestinations()
	a, b := flowTo(vip6, 80, config.TCP), flowTo(vip6, 81, config.TCP)
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
	f.ignoreDestinations()
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
