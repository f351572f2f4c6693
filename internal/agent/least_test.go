// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// leastConfig is a service with policy least on the ports 80 and 81 of both VIPs. Nothing listens
// on port 81.
func leastConfig(kind desired.Encapsulation) *desired.Agent {
	return huntingConfig(kind, desired.Accept{Policy: desired.AcceptLeast}, desired.NotLocalDrop)
}

// candidateSID returns the SID of a candidate, from 1, with a function and an argument.
func candidateSID(i int, function srv6.Function, offer srv6.Offer) netip.Addr {
	locator := netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: 5, 7: byte(i)}), 64)
	return srv6.SID{Locator: locator, Function: function, Argument: offer.Argument()}.Addr()
}

// told is the offer of a candidate that has told its load. A capacity of 0 means that it has none.
func told(column int, busy, capacity uint32) srv6.Offer {
	return srv6.Offer{Column: column, Next: busy + 1, Capacity: capacity}
}

// offered returns the SYN of an offer as it arrives at the candidate at an index of the list. The
// list is in the order of travel.
func offered(kind desired.Encapsulation, f flow, list []netip.Addr, at int) []byte {
	frame := wrap(packet.TCP(f.client, f.vip), packet.Encap{
		Kind: kind, Sender: sender, Segments: list, FlowLabel: 0x12345, Whole: true,
	})
	return arrived(frame, at)
}

// arrived returns the frame after some candidates have passed it on.
func arrived(frame []byte, hops int) []byte {
	for range hops {
		frame = advanced(frame)
	}
	return frame
}

// lasting returns a time for a load that must not become stale during a test, however busy the
// machine is: the time is an hour ahead.
func lasting(t testing.TB) int64 {
	t.Helper()
	now, err := monotonic()
	testhost.Must(t, err)
	return now + int64(time.Hour)
}

// setLoads writes the load of the VIP's services, or none.
func setLoads(t testing.TB, k *kernel, cfg *desired.Agent, load *accept.Load) {
	t.Helper()
	for _, s := range cfg.Services {
		testhost.Must(t, k.objects.Loads.Put(serviceKey(s), agentLoad{}))
		if load == nil {
			continue
		}
		value := agentLoad{Busy: load.Busy, Capacity: load.Capacity, When: uint64(lasting(t))}
		testhost.Must(t, k.objects.Loads.Put(serviceKey(s), value))
	}
}

// leastWays are the encapsulations of offers.
var leastWays = []struct {
	kind desired.Encapsulation
	flow flow
}{
	{desired.SRv6Insert, flow{client6, vip6}},
	{desired.SRv6Encap, flow{client6, vip6}},
	{desired.SRv6Encap, flow{client4, vip4}},
}

// leastStage is a data path with policy least, and a namespace where the service listens.
type leastStage struct {
	*stage
	k   *kernel
	cfg *desired.Agent
}

func newLeastStage(t *testing.T) *leastStage {
	t.Helper()
	s := &leastStage{newStage(t), testKernel(t), nil}
	s.listen(vip4)
	s.listen(vip6)
	return s
}

// be gives the data path the configuration of the candidate with a number, from 1.
func (s *leastStage) be(kind desired.Encapsulation, candidate int, load *accept.Load) {
	s.t.Helper()
	s.beIn(leastConfig(kind), candidate, load)
}

// beIn is the same as be, but with a configuration other than leastConfig.
func (s *leastStage) beIn(cfg *desired.Agent, candidate int, load *accept.Load) {
	s.t.Helper()
	s.cfg = cfg
	s.cfg.Node.Locator = srv6.Parse(candidateSID(candidate, srv6.Host, srv6.Offer{})).Locator
	testhost.Must(s.t, s.k.write(newTableContent(s.cfg, mtu)))
	setLoads(s.t, s.k, s.cfg, load)
}

// give passes an offer to the data path. It returns the reason, the result of the offer, and the
// frame.
func (s *leastStage) give(f flow, frame []byte) (reason, result string, out []byte) {
	s.t.Helper()
	setFlow(s.t, s.k, f, desired.SRv6Insert, "", 0)
	s.do(func() error {
		before, offersBefore := counters(s.t, s.k), offers(s.t, s.k, f.vip)
		_, out = runAgent(s.t, s.k, frame)
		reasons := slices.Collect(maps.Keys(changed(before, counters(s.t, s.k))))
		for name, n := range offers(s.t, s.k, f.vip) {
			if n != offersBefore[name] {
				result = name
			}
		}
		reason = fmt.Sprint(reasons)
		return nil
	})
	return reason, result, out
}

// list returns the offers of candidates 1 to n in the order of travel, with the loads that the
// first of them have told.
func list(n int, loads ...srv6.Offer) (all []netip.Addr) {
	for i := range n {
		offer := srv6.Offer{Column: i}
		if i < len(loads) {
			offer = loads[i]
		}
		all = append(all, candidateSID(i+1, srv6.ConnectAvail, offer))
	}
	return all
}

// TestLeast has the decisions of policy least written out.
func TestLeast(t *testing.T) {
	s := newLeastStage(t)
	two := func(busy uint32) *accept.Load { return &accept.Load{Busy: busy, Capacity: 2} }
	none := func(busy uint32) *accept.Load { return &accept.Load{Busy: busy, Capacity: accept.NoCapacity} }
	unknown := srv6.Offer{Column: 7}
	for _, c := range []struct {
		name   string
		list   []netip.Addr
		at     int // index of this candidate
		load   *accept.Load
		result string
		next   netip.Addr // where the packet goes on to
		entry  netip.Addr // what this candidate's entry becomes, if that changes
	}{
		{"free, first", list(3), 0, two(1), "accepted", netip.Addr{}, netip.Addr{}},
		{"free, last", list(2, told(0, 2, 2)), 1, two(1), "accepted", netip.Addr{}, netip.Addr{}},
		{"busy, first", list(2), 0, two(2), "refused", list(2)[1],
			candidateSID(1, srv6.ConnectAvail, told(0, 2, 2))},
		{"busy, in the middle", list(3, told(0, 9, 2)), 1, two(2), "refused", list(3)[2],
			candidateSID(2, srv6.ConnectAvail, told(1, 2, 2))},
		{"no capacity, never free", list(2), 0, none(0), "refused", list(2)[1],
			candidateSID(1, srv6.ConnectAvail, told(0, 0, 0))},
		{"busy and alone", list(1), 0, two(7), "accepted_least", netip.Addr{}, netip.Addr{}},
		{"the last is the least busy", list(3, told(0, 4, 2), told(1, 5, 2)), 2, two(3), "accepted_least",
			netip.Addr{}, netip.Addr{}},
		{"as busy as another", list(2, told(0, 3, 2)), 1, two(3), "accepted_least", netip.Addr{}, netip.Addr{}},
		{"to the least busy", list(4, told(0, 5, 2), told(1, 2, 2), told(2, 3, 2)), 3, two(4), "returned",
			candidateSID(2, srv6.ConnectForce, told(1, 2, 2)), candidateSID(2, srv6.ConnectForce, told(1, 2, 2))},
		{"to the first of two", list(3, told(0, 3, 2), told(1, 3, 2)), 2, two(4), "returned",
			candidateSID(1, srv6.ConnectForce, told(0, 3, 2)), candidateSID(1, srv6.ConnectForce, told(0, 3, 2))},
		{"to the larger server", list(2, told(0, 6, 4)), 1, two(3), "returned",
			candidateSID(1, srv6.ConnectForce, told(0, 6, 4)), candidateSID(1, srv6.ConnectForce, told(0, 6, 4))},
		{"without capacities", list(2, told(0, 65, 0)), 1, none(66), "returned",
			candidateSID(1, srv6.ConnectForce, told(0, 65, 0)), candidateSID(1, srv6.ConnectForce, told(0, 65, 0))},
		{"unknown, first", list(2), 0, nil, "accepted_stale", netip.Addr{}, netip.Addr{}},
		{"unknown, in the middle", list(3, unknown), 1, nil, "refused", list(3)[2], netip.Addr{}},
		{"unknown, last of unknown ones", list(2, unknown), 1, nil, "forced", netip.Addr{}, netip.Addr{}},
		{"unknown, last, and one is known", list(3, unknown, told(1, 9, 1)), 2, nil, "returned",
			candidateSID(2, srv6.ConnectForce, told(1, 9, 1)), candidateSID(2, srv6.ConnectForce, told(1, 9, 1))},
		{"busy, last of unknown ones", list(2, unknown), 1, two(9), "accepted_least", netip.Addr{}, netip.Addr{}},
		{"behind a server that drains",
			append([]netip.Addr{candidateSID(9, srv6.Steer, srv6.Offer{})}, list(2)...), 1, nil, "accepted_stale",
			netip.Addr{}, netip.Addr{}},
		{"forced", []netip.Addr{candidateSID(1, srv6.ConnectForce, srv6.Offer{})}, 0, two(9), "forced",
			netip.Addr{}, netip.Addr{}},
		{"taken back", []netip.Addr{candidateSID(1, srv6.ConnectForce, told(0, 3, 2))}, 0, two(9), "taken_back",
			netip.Addr{}, netip.Addr{}},
		// Lists that no balancer makes.
		{"a load of its own", list(2, told(0, 1, 2))[:1:1], 0, two(9), "accepted_least", netip.Addr{}, netip.Addr{}},
		{"a multicast group is no candidate",
			[]netip.Addr{netip.MustParseAddr("ff02::1:0:10:2"), list(2)[1]}, 1, two(9), "accepted_least",
			netip.Addr{}, netip.Addr{}},
		{"a balancer is no candidate",
			[]netip.Addr{candidateSID(9, srv6.CreateStickiness, told(0, 0, 1)), list(2)[1]}, 1, two(9),
			"accepted_least", netip.Addr{}, netip.Addr{}},
	} {
		for _, way := range leastWays {
			t.Run(fmt.Sprintf("%s/%s/%v", c.name, way.kind, way.flow.vip.Addr()), func(t *testing.T) {
				self := int(srv6.Parse(c.list[c.at]).Locator.Addr().As16()[7])
				s.be(way.kind, self, c.load)
				frame := offered(way.kind, way.flow, c.list, c.at)
				reason, result, out := s.give(way.flow, frame)
				if result != c.result {
					t.Errorf("left as %s, %q; want %q", reason, result, c.result)
				}
				want := leaves(t, frame, c.result, c.next, c.entry)
				if diff := cmp.Diff(want, out); diff != "" {
					t.Errorf("frame (-want +got):\n%s", diff)
				}
			})
		}
	}
}

// leaves returns the frame that leaves XDP after the result of an offer. entry is what the
// candidate's entry becomes, if that changes. next is the next destination, if there is one.
func leaves(t *testing.T, frame []byte, result string, next, entry netip.Addr) (out []byte) {
	t.Helper()
	var err error
	switch {
	case !next.IsValid():
		out, err = packet.Decapsulate(frame)
	case result == "returned":
		out, err = packet.HandBack(frame, entry)
	default:
		out = frame
		if entry.IsValid() {
			out, err = packet.SetActive(frame, entry)
		}
		if err == nil {
			out, err = packet.Advance(out)
		}
	}
	testhost.Must(t, err)
	if next.IsValid() {
		if to := netip.AddrFrom16([16]byte(out[14+24:])); to != next {
			t.Fatalf("the expected frame goes to %v, want %v", to, next)
		}
		out = packet.SetMACs(out, hostMAC, hostMAC)
	}
	return out
}

// taker returns the index of the candidate that gets a connection, by the definition of policy
// least. A nil load is unknown.
func taker(loads []*accept.Load) int {
	last := len(loads) - 1
	for i, l := range loads {
		switch {
		case l == nil && i == 0 && len(loads) > 1:
			return i
		case l != nil && l.Capacity != accept.NoCapacity && l.Busy < l.Capacity:
			return i
		}
	}
	least := last // the last candidate keeps the connection if no other has a lower load
	for i, l := range loads[:last] {
		lowest := loads[least]
		if l != nil && (lowest == nil || perUnit(l).Cmp(perUnit(lowest)) < 0) {
			least = i
		}
	}
	return least
}

// perUnit returns the load with one connection more, per unit of capacity.
func perUnit(l *accept.Load) *big.Rat {
	capacity := int64(1)
	if l.Capacity != accept.NoCapacity {
		capacity = int64(l.Capacity)
	}
	return big.NewRat(int64(l.Busy)+1, capacity)
}

// TestChains lets offers travel along two to eight candidates with random loads. The right one gets
// the connection. The packet keeps its length, stays valid, and visits at most one candidate twice.
func TestChains(t *testing.T) {
	s := newLeastStage(t)
	random := rand.New(rand.NewPCG(15, 1))
	backs := 0
	for n := 2; n <= 8; n++ {
		for range 4 {
			loads := make([]*accept.Load, n)
			for i := range loads {
				loads[i] = busyLoad(random)
			}
			way := leastWays[random.IntN(len(leastWays))]
			name := fmt.Sprintf("%s, %v", way.kind, describeLoads(loads))
			frame := offered(way.kind, way.flow, list(n), 0)
			got, hops := 0, 0
			for result := ""; ; hops++ {
				s.be(way.kind, got+1, loads[got])
				var out []byte
				if _, result, out = s.give(way.flow, frame); result != "refused" && result != "returned" {
					break
				}
				if err := packet.Verify(out); err != nil || len(out) != len(frame) {
					t.Fatalf("%s: after %d hops, %d bytes of %d: %v", name, hops, len(out), len(frame), err)
				}
				frame = out
				got = int(out[14+24+7]) - 1
				if result == "returned" {
					backs++
				}
			}
			if want := taker(loads); got != want || hops > n {
				t.Errorf("%s: taken by candidate %d after %d hops, want %d", name, got, hops, want)
			}
		}
	}
	if backs == 0 {
		t.Error("no connection was handed back")
	}
}

func describeLoads(loads []*accept.Load) (all []string) {
	for _, l := range loads {
		text := "unknown"
		if l != nil && l.Capacity == accept.NoCapacity {
			text = fmt.Sprint(l.Busy)
		} else if l != nil {
			text = fmt.Sprintf("%d of %d", l.Busy, l.Capacity)
		}
		all = append(all, text)
	}
	return all
}

// busyLoad returns a load that is seldom free, nil for an unknown one.
func busyLoad(random *rand.Rand) *accept.Load {
	l := &accept.Load{Busy: 2 + random.Uint32N(6), Capacity: 1 + random.Uint32N(3)}
	switch random.IntN(8) {
	case 0:
		return nil
	case 1:
		l.Capacity = accept.NoCapacity
	case 2:
		l.Busy = random.Uint32N(3)
	}
	return l
}

// TestLists compares the data path with the reference on lists of all kinds, and on all loads, with
// the policies that tell or compare loads.
func TestLists(t *testing.T) {
	s := newLeastStage(t)
	random := rand.New(rand.NewPCG(15, 2))
	seen := map[string]int{}
	for i := range 3000 {
		way := leastWays[random.IntN(len(leastWays))]
		load := anyLoad(random)
		if i%100 == 0 || s.cfg.Services[0].Encapsulation != way.kind {
			s.beIn(anyPolicy(random, way.kind), 1, load)
		}
		setLoads(s.t, s.k, s.cfg, load)
		f := way.flow
		if random.IntN(4) == 0 { // nothing listens there
			f.vip = netip.AddrPortFrom(f.vip.Addr(), 81)
		}
		frame := anyOffer(random, way.kind, f)
		ref := newReference(s.cfg)
		ref.sockets = listensAtPort80
		for _, p := range ref.services {
			p.load = load
		}
		wantReason, want := ref.receive(frame)
		reason, result, out := s.give(f, frame)
		if reason != fmt.Sprintf("[%s]", wantReason) || !bytes.Equal(want, out) || (result == "") != (len(ref.offers) == 0) ||
			result != "" && ref.offers[result] != 1 {
			t.Fatalf("frame %d with %v: left as %s (%s), want %s (%v)\n%s\n(-want +got):\n%s", i, describeLoads([]*accept.Load{load}),
				reason, result, wantReason, ref.offers, explain(frame), cmp.Diff(want, out))
		}
		seen[result]++
	}
	for _, result := range []string{
		"accepted", "accepted_stale", "accepted_least", "refused", "refused_down", "returned",
		"taken_back", "forced",
	} {
		if seen[result] < 10 {
			t.Errorf("so few offers were %s: %v", result, seen)
		}
	}
	t.Log(seen)
}

// anyNumber returns a number that is small or at a limit.
func anyNumber(random *rand.Rand) uint32 {
	if random.IntN(3) > 0 {
		return random.Uint32N(6)
	}
	limits := []uint32{srv6.MaxLoad - 1, srv6.MaxLoad, srv6.MaxLoad + 1, 1 << 31, math.MaxUint32 - 1, math.MaxUint32}
	return limits[random.IntN(len(limits))]
}

// anyPolicy returns a service with a policy that tells its load, which may be drained.
func anyPolicy(random *rand.Rand, kind desired.Encapsulation) *desired.Agent {
	cfg := leastConfig(kind)
	if random.IntN(3) == 0 {
		three := uint32(3)
		policy := desired.Accept{Policy: desired.AcceptStatic, Threshold: &three}
		cfg = huntingConfig(kind, policy, desired.NotLocalDrop)
	}
	isDrained := random.IntN(4) == 0
	for i := range cfg.Services {
		cfg.Services[i].Drained = isDrained
	}
	return cfg
}

func anyLoad(random *rand.Rand) *accept.Load {
	if random.IntN(6) == 0 {
		return nil
	}
	return &accept.Load{Busy: anyNumber(random), Capacity: anyNumber(random)}
}

// anyOffer returns an offer to candidate 1, which is anywhere in a list of any candidates.
func anyOffer(random *rand.Rand, kind desired.Encapsulation, f flow) []byte {
	functions := []srv6.Function{srv6.ConnectAvail, srv6.ConnectAvail, srv6.ConnectAvail, srv6.ConnectAvail,
		srv6.ConnectForce, srv6.Steer, srv6.Host, srv6.CreateStickiness}
	segments := make([]netip.Addr, 1+random.IntN(11))
	at := random.IntN(len(segments))
	for i := range segments {
		offer := srv6.Offer{Column: random.IntN(8), Capacity: anyNumber(random) & srv6.MaxLoad}
		if random.IntN(4) > 0 {
			offer.Next = anyNumber(random) & srv6.MaxLoad
		}
		if random.IntN(4) == 0 {
			offer.Column = srv6.NoColumn
		}
		function, candidate := functions[random.IntN(len(functions))], 2+random.IntN(8)
		if i == at {
			offers := []srv6.Function{srv6.ConnectAvail, srv6.ConnectForce}
			function, candidate = offers[random.IntN(2)], 1
		} else if random.IntN(20) == 0 {
			candidate = 1
		}
		segments[i] = candidateSID(candidate, function, offer)
	}
	encap := packet.Encap{Kind: kind, Sender: sender, Segments: segments, Whole: random.IntN(4) > 0}
	frame := wrap(packet.TCP(f.client, f.vip), encap)
	frame = arrived(frame, at)
	if random.IntN(10) == 0 {
		frame = packet.SetHopLimit(frame, uint8(1+random.IntN(2)))
	}
	if random.IntN(10) == 0 { // the destination is not the server's entry of the list
		frame = set(frame, functionAt+2+random.IntN(6), byte(random.Uint32()))
	}
	if left := int(frame[14+srhSegmentsLeft]); random.IntN(10) == 0 && at > 0 {
		frame = set(frame, srhAt+8+16*left+7, 9) // the entry has the locator of another server
	}
	return frame
}
