// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"bytes"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// hunted is a flow of the service huntedQUIC.
var hunted = flow{client6, netip.AddrPortFrom(vip6.Addr(), 4433)}

// huntedQUIC is a service of QUIC whose connections are offered.
func huntedQUIC() desired.AgentService {
	return desired.AgentService{
		Name: "hunted", VIP: hunted.vip.Addr(), Port: desired.Port(hunted.vip.Port()), Protocol: desired.UDP,
		Encapsulation: desired.SRv6Insert, Accept: desired.Accept{Policy: desired.AcceptLeast},
		Load: desired.Source{Kind: desired.LoadSharedMemory, Path: "/unused"},
	}
}

// The destination IDs of two connections. Clients choose at least eight octets.
var firstID, secondID = unhex("0102030405060708"), unhex("0102030405060709ff")

// quicOffered returns a datagram of a flow with a packet of QUIC, as it arrives at the candidate at
// an index of the list.
func quicOffered(kind desired.Encapsulation, f flow, payload []byte, list []netip.Addr, at int) []byte {
	frame := wrap(packet.UDP(f.client, f.vip, packet.Payload(payload)), packet.Encap{
		Kind: kind, Sender: sender, Segments: list, FlowLabel: 0x12345, Whole: true,
	})
	return arrived(frame, at)
}

// initialCaptures are frames of offers of QUIC. Each connection has several.
func initialCaptures() (frames [][]byte) {
	source := unhex("aabbccdd")
	payloads := [][]byte{
		longHeader(0, version1, firstID, source), longHeader(1, version1, firstID, source),
		longHeader(1, version2, secondID, source), longHeader(2, version1, firstID, source),
		longHeader(0, version1, firstID[:7], source), longHeader(0, version3, firstID, source),
		longHeader(0, version1, firstID, source)[:6+7], shortHeader(firstID), nil,
	}
	steered := candidateSID(1, srv6.Steer, srv6.Offer{})
	forced := candidateSID(1, srv6.ConnectForce, told(0, 3, 2))
	marked := candidateSID(1, srv6.ConnectAvail, srv6.Offer{Column: 1, Cookie: 3})
	for _, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap} {
		for _, f := range []flow{hunted, {client6, h3}} {
			for _, payload := range payloads {
				frames = append(frames,
					quicOffered(kind, f, payload, list(3), 0),
					quicOffered(kind, f, payload, reversed(list(3, told(0, 3, 2), told(1, 2, 2), told(2, 2, 2))), 2),
					quicOffered(kind, f, payload, []netip.Addr{forced}, 0),
					quicOffered(kind, f, payload, []netip.Addr{marked, list(2)[1]}, 0),
					quicOffered(kind, f, payload, append([]netip.Addr{steered}, list(3)[1:]...), 0),
					quicOffered(kind, f, payload, []netip.Addr{steered}, 0))
			}
		}
	}
	return frames
}

// reversed returns a list in reverse order: its first candidate becomes the last one.
func reversed(list []netip.Addr) []netip.Addr {
	list = slices.Clone(list)
	slices.Reverse(list)
	return list
}

// initialStage is a data path with the service huntedQUIC, which has an application.
type initialStage struct {
	*leastStage
}

func newInitialStage(t *testing.T) *initialStage {
	t.Helper()
	s := &initialStage{&leastStage{newStage(t), testKernel(t), nil}}
	s.do(func() error {
		conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(hunted.vip))
		if err == nil {
			t.Cleanup(func() { _ = conn.Close() })
		}
		return err
	})
	return s
}

// be makes the data path that of the first candidate, with a load.
func (s *initialStage) be(load *accept.Load) {
	s.t.Helper()
	cfg := testConfig()
	cfg.Services = append(cfg.Services, huntedQUIC())
	s.beIn(cfg, 1, load)
}

// receive passes a frame to the data path. It returns the reason, the results of offers, and the
// frame.
func (s *initialStage) receive(frame []byte) (reason string, results []string, out []byte) {
	s.t.Helper()
	key := serviceKey(huntedQUIC())
	s.do(func() error {
		before, offersBefore := counters(s.t, s.k), offersOf(s.t, s.k, key)
		_, out = runAgent(s.t, s.k, frame)
		for name := range changed(before, counters(s.t, s.k)) {
			reason += name
		}
		for name, n := range offersOf(s.t, s.k, key) {
			if n != offersBefore[name] {
				results = append(results, name)
			}
		}
		return nil
	})
	return reason, results, out
}

// step is a datagram of QUIC in a test, and what becomes of it.
type step struct {
	payload []byte
	list    []netip.Addr
	at      int
	load    *accept.Load // of this server when the datagram arrives
	reason  string
	result  string     // of the offer; "": it is none, or it was decided before
	next    netip.Addr // to which candidate it goes back
}

func TestInitialsFollowTheFirst(t *testing.T) {
	busy, free := &accept.Load{Busy: 2, Capacity: 2}, &accept.Load{Busy: 1, Capacity: 2}
	source := unhex("aabbccdd")
	first, zeroRTT := longHeader(0, version1, firstID, source), longHeader(1, version1, firstID, source)
	second := longHeader(0, version1, secondID, source)
	last := func(loads ...srv6.Offer) []netip.Addr { // candidates 3, 2 and 1
		all := list(3, append([]srv6.Offer{{}}, loads...)...)
		return reversed(all)
	}
	force := func(offer srv6.Offer) []netip.Addr {
		return []netip.Addr{candidateSID(1, srv6.ConnectForce, offer)}
	}
	steered := []netip.Addr{candidateSID(1, srv6.Steer, srv6.Offer{}), list(2)[1]}
	back := func(i int, offer srv6.Offer) netip.Addr { return candidateSID(i, srv6.ConnectForce, offer) }
	for name, steps := range map[string][]step{
		"passed on": {
			{first, list(2), 0, busy, "next_refused", "refused", netip.Addr{}},
			{first, list(2), 0, free, "next_refused", "", netip.Addr{}},
			{zeroRTT, list(2), 0, free, "next_refused", "", netip.Addr{}},
			{second, list(2), 0, free, "deliver", "accepted", netip.Addr{}},
			{first, list(1), 0, busy, "deliver", "accepted_least", netip.Addr{}}, // nobody is left
		},
		"taken": {
			{first, list(2), 0, free, "deliver", "accepted", netip.Addr{}},
			{zeroRTT, list(2), 0, busy, "deliver", "", netip.Addr{}},
			{first, last(told(1, 0, 2), told(2, 0, 2)), 2, busy, "deliver", "", netip.Addr{}},
			{second, list(2), 0, busy, "next_refused", "refused", netip.Addr{}},
		},
		"handed back": {
			{first, last(told(1, 2, 2), told(2, 9, 2)), 2, &accept.Load{Busy: 5, Capacity: 2}, "next_returned", "returned", back(2, told(1, 2, 2))},
			{first, last(told(1, 8, 2), told(2, 3, 2)), 2, busy, "next_returned", "", back(2, told(1, 8, 2))},
			{first, last(), 2, free, "next_returned", "", back(2, srv6.Offer{Column: 1})},
			// The list does not have the candidate any more.
			{first, []netip.Addr{last()[0], last()[2]}, 1, free, "deliver", "accepted", netip.Addr{}},
		},
		"taken back": {
			{first, list(2), 0, busy, "next_refused", "refused", netip.Addr{}},
			{first, force(told(0, 2, 2)), 0, busy, "deliver", "taken_back", netip.Addr{}},
			{first, list(2), 0, busy, "deliver", "", netip.Addr{}},
		},
		"steered": {
			{second, steered, 0, free, "next_not_local", "", netip.Addr{}},
			{second, steered[:1], 0, free, "drop_not_local", "", netip.Addr{}},
			{first, list(2), 0, free, "deliver", "accepted", netip.Addr{}},
			{second, steered, 0, busy, "deliver", "", netip.Addr{}},
			{second, list(2), 0, busy, "next_refused", "refused", netip.Addr{}}, // it was not offered before
		},
		"steered, but passed on": {
			{first, list(2), 0, busy, "next_refused", "refused", netip.Addr{}},
			{second, steered, 0, free, "next_not_local", "", netip.Addr{}},
		},
		"not an offer": {
			{longHeader(2, version1, firstID, source), list(2), 0, free, "drop_tcp_flags", "", netip.Addr{}},
			{shortHeader(firstID), list(2), 0, free, "drop_tcp_flags", "", netip.Addr{}},
		},
	} {
		for _, kind := range []desired.Encapsulation{desired.SRv6Insert, desired.SRv6Encap} {
			t.Run(name+"/"+string(kind), func(t *testing.T) {
				s := newInitialStage(t)
				for i, step := range steps {
					s.be(step.load)
					frame := quicOffered(kind, hunted, step.payload, step.list, step.at)
					reason, results, out := s.receive(frame)
					if step.reason == "deliver" {
						step.reason += map[desired.Encapsulation]string{
							desired.SRv6Insert: "_srv6_insert", desired.SRv6Encap: "_srv6_encap",
						}[kind]
					}
					if reason != step.reason || len(results) > 1 || len(results) == 1 && results[0] != step.result ||
						len(results) == 0 && step.result != "" {
						t.Fatalf("datagram %d: %s, %v; want %s, %s", i, reason, results, step.reason, step.result)
					}
					if step.next.IsValid() && netip.AddrFrom16([16]byte(out[14+24:])) != step.next {
						t.Fatalf("datagram %d goes to %v, want %v", i, netip.AddrFrom16([16]byte(out[14+24:])), step.next)
					}
				}
			})
		}
	}
}

// The second of two datagrams follows the first one in memory only for half a minute. The oldest
// decision of a bucket makes room for a new one.
func TestInitialsAreForgotten(t *testing.T) {
	s := newInitialStage(t)
	table := tableOf(t, s.k).initials
	busy, free := &accept.Load{Busy: 2, Capacity: 2}, &accept.Load{Busy: 1, Capacity: 2}
	give := func(id []byte, load *accept.Load) string {
		s.be(load)
		reason, _, _ := s.receive(quicOffered(desired.SRv6Insert, hunted, longHeader(0, version1, id, nil), list(2), 0))
		return reason
	}
	const sinceShift, tick, lifetime, sinceMask = 16, 1 << 16, 224, 0xfff << 16
	age := func(word, ticks uint64) uint64 { return word&^sinceMask | (word-ticks*tick)&sinceMask }
	used := func() (at *uint64) {
		for i := range table {
			for j := range table[i].Decision {
				if table[i].Decision[j] != 0 {
					at = &table[i].Decision[j]
				}
			}
		}
		return at
	}
	if reason := give(firstID, busy); reason != "next_refused" {
		t.Fatal(reason)
	}
	at := used()
	*at = age(*at, lifetime-8) // the test has a second to go on
	if reason := give(firstID, free); reason != "next_refused" {
		t.Fatalf("before its time is over: %s", reason)
	}
	*at = age(*at, lifetime)
	if reason := give(firstID, free); reason != "deliver_srv6_insert" {
		t.Fatalf("after its time: %s", reason)
	}

	bucket := slices.IndexFunc(table, func(b agentInitialBucket) bool { return slices.Contains(b.Decision[:], *at) })
	now := *at
	for i := range table[bucket].Decision { // of other flows, the fourth is the oldest
		table[bucket].Decision[i] = age(now^1<<63, uint64(100-i))
	}
	table[bucket].Decision[3] = age(now^1<<63, 150)
	before := table[bucket]
	give(secondID, free)
	for i := range before.Decision {
		if changes := table[bucket].Decision[i] != before.Decision[i]; changes != (i == 3) {
			t.Errorf("decision %d: changed: %t", i, changes)
		}
	}
	table[bucket].Decision[5] = 0 // an empty place is used before any decision is forgotten
	before = table[bucket]
	give(firstID, free)
	for i := range before.Decision {
		if changes := table[bucket].Decision[i] != before.Decision[i]; changes != (i == 5) {
			t.Errorf("with an empty place, decision %d: changed: %t", i, changes)
		}
	}
}

// A server without an application passes connections on.
func TestInitialsWithoutApplication(t *testing.T) {
	s := &initialStage{&leastStage{newStage(t), testKernel(t), nil}}
	s.be(&accept.Load{Busy: 0, Capacity: 2})
	frame := quicOffered(desired.SRv6Encap, hunted, longHeader(0, version1, firstID, nil), list(2), 0)
	reason, results, out := s.receive(frame)
	if reason != "next_refused" || !slices.Equal(results, []string{"refused_down"}) {
		t.Errorf("%s, %v", reason, results)
	}
	want, err := packet.Advance(frame)
	testhost.Must(t, err)
	if want = packet.SetMACs(want, hostMAC, hostMAC); !bytes.Equal(want, out) {
		t.Errorf("(-want +got):\n%s", cmp.Diff(want, out))
	}
}

// A trace tells what becomes of an Initial packet. It decides nothing.
func TestTraceInitial(t *testing.T) {
	s := newInitialStage(t)
	s.be(&accept.Load{Busy: 2, Capacity: 2})
	trace := func() (offer, named string) {
		s.do(func() error {
			got, err := tracingView(t, s.k).TraceInitial(hunted.client, hunted.vip)
			if err != nil {
				return err
			}
			if got.Service != "hunted" || got.Socket != "listening" {
				t.Errorf("service %q, socket %q", got.Service, got.Socket)
			}
			for _, a := range got.Answers {
				switch {
				case a.Last:
				case a.Function == srv6.ConnectAvail.String():
					offer = a.Outcome + " " + a.Offer
				case a.Function == srv6.Steer.String():
					named = a.Outcome
				}
			}
			return nil
		})
		return offer, named
	}
	if offer, named := trace(); offer != "next_refused refused" || named != "next_not_local" {
		t.Errorf("busy: %s; %s", offer, named)
	}
	s.be(&accept.Load{Busy: 1, Capacity: 2})
	s.receive(quicOffered(desired.SRv6Insert, hunted, longHeader(0, version1, firstID, nil), list(2), 0))
	if offer, named := trace(); offer != "deliver accepted" || named != "deliver" {
		t.Errorf("free: %s; %s", offer, named)
	}
}
