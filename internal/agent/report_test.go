// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

// wanting is an offer that asks for a report.
func wanting(offer srv6.Offer) srv6.Offer {
	offer.WantsReport = true
	return offer
}

// sentReport transmits a packet of the application, and returns the report in its signal. ok is
// false if the packet carries no signal with a report.
func (s *leastStage) sentReport(
	kind desired.Encapsulation, f flow, flags packet.TCPFlags,
) (report srv6.Report, argument uint64, sid srv6.SID, ok bool) {
	s.t.Helper()
	frame := packet.TCP(f.vip, f.client, packet.Flags(flags))
	var out []byte
	s.do(func() error {
		_, out = transmit(s.t, s.k, frame, 0)
		return nil
	})
	if len(out) == len(frame) {
		return report, 0, sid, false
	}
	at := 14 + 8 // the source
	if kind == desired.SRv6Insert {
		at = 14 + 40 + 8 + 2*16 // the last entry of the list
	}
	own := srv6.Parse(netip.AddrFrom16([16]byte(out[at:])))
	if own.Function != srv6.Host {
		s.t.Errorf("the server's segment is %v", own)
	}
	sid = srv6.Parse(netip.AddrFrom16([16]byte(out[14+24:])))
	report, ok = srv6.ParseReport(own.Argument)
	return report, own.Argument, sid, ok
}

// requireNow fails the test unless a serial is of the present time.
func requireNow(t *testing.T, serial uint32) {
	t.Helper()
	now, err := monotonic()
	testhost.Must(t, err)
	// 2,000 ticks are 8 s.
	if late := (uint32(now>>22) - serial) & (1<<27 - 1); late > 2000 {
		t.Errorf("the serial is %d ticks before now", late)
	}
}

// A create-stickiness reports the server's load, and what the first candidate of the list has told.
func TestReports(t *testing.T) {
	s := newLeastStage(t)
	own, none := &accept.Load{Busy: 1, Capacity: 2}, srv6.FirstCandidate{Column: srv6.NoColumn}
	ca := func(i int, offer srv6.Offer) netip.Addr {
		return candidateSID(i, srv6.ConnectAvail, wanting(offer))
	}
	for _, c := range []struct {
		name string
		list []netip.Addr
		at   int
		load *accept.Load
		want srv6.Report
	}{
		{"alone", []netip.Addr{candidateSID(1, srv6.ConnectForce, wanting(srv6.Offer{}))}, 0, own,
			srv6.Report{Load: 16, IsFirst: true}},
		{"first", []netip.Addr{ca(1, srv6.Offer{}), ca(2, srv6.Offer{Column: 1})}, 0, own,
			srv6.Report{Load: 16, IsFirst: true}},
		{"second", []netip.Addr{ca(2, told(5, 4, 2)), ca(1, srv6.Offer{Column: 1})}, 1, own,
			srv6.Report{Load: 16, First: srv6.FirstCandidate{Column: 5, Load: accept.Code(accept.Load{Busy: 4, Capacity: 2})}}},
		{"behind one that told no load", []netip.Addr{ca(2, srv6.Offer{Column: 5}), ca(1, srv6.Offer{})}, 1, own,
			srv6.Report{Load: 16, First: srv6.FirstCandidate{Column: 5}}},
		{"behind one without a column", []netip.Addr{ca(2, told(srv6.NoColumn, 4, 2)), ca(1, srv6.Offer{})}, 1, own,
			srv6.Report{Load: 16, First: none}},
		{"taken back, first", []netip.Addr{ca(1, told(0, 3, 2)), ca(2, told(1, 5, 2)),
			candidateSID(1, srv6.ConnectForce, wanting(told(0, 3, 2)))}, 2, &accept.Load{Busy: 3, Capacity: 2},
			srv6.Report{Load: 32, IsFirst: true}},
		{"taken back, not first", []netip.Addr{ca(2, told(3, 7, 2)), ca(1, told(1, 3, 2)),
			candidateSID(1, srv6.ConnectForce, wanting(told(1, 3, 2)))}, 2, &accept.Load{Busy: 3, Capacity: 2},
			srv6.Report{Load: 32, First: srv6.FirstCandidate{Column: 3, Load: accept.Code(accept.Load{Busy: 7, Capacity: 2})}}},
		{"behind a server that drains", []netip.Addr{candidateSID(9, srv6.Steer, srv6.Offer{}), ca(1, srv6.Offer{}),
			ca(2, srv6.Offer{})}, 1, own, srv6.Report{Load: 16, IsFirst: true}},
		{"of an unknown load", []netip.Addr{ca(1, srv6.Offer{}), ca(2, srv6.Offer{})}, 0, nil, srv6.Report{IsFirst: true}},
	} {
		for _, way := range leastWays {
			t.Run(fmt.Sprintf("%s/%s/%v", c.name, way.kind, way.flow.vip.Addr()), func(t *testing.T) {
				s.be(way.kind, 1, c.load)
				if reason, result, _ := s.give(way.flow, offered(way.kind, way.flow, c.list, c.at)); getFlow(t, s.k, way.flow).state != "wait" {
					t.Fatalf("the flow was not taken: %s, %s", reason, result)
				}
				got, _, _, ok := s.sentReport(way.kind, way.flow, packet.SYN|packet.ACK)
				requireNow(t, got.Serial)
				if got.Serial = 0; !ok || got != c.want {
					t.Errorf("reported %+v, %v, want %+v", got, ok, c.want)
				}
				// The end is of this flow, so the load is that of the others.
				setLoads(t, s.k, s.cfg, &accept.Load{Busy: 6, Capacity: 2})
				got, _, _, ok = s.sentReport(way.kind, way.flow, packet.FIN|packet.ACK)
				requireNow(t, got.Serial)
				got.Serial = 0
				if want := (srv6.Report{Load: accept.Code(accept.Load{Busy: 5, Capacity: 2}), First: none}); !ok || got != want {
					t.Errorf("at the end, reported %+v, %v, want %+v", got, ok, want)
				}
			})
		}
	}
}

// A server reports to a balancer that has asked for reports of the flow, and to no other.
func TestReportsAreAskedFor(t *testing.T) {
	s := newLeastStage(t)
	load := &accept.Load{Busy: 1, Capacity: 2}
	for _, way := range leastWays {
		s.be(way.kind, 1, load)
		send := func(sender netip.Addr, function srv6.Function, offer srv6.Offer, flags packet.TCPFlags) {
			t.Helper()
			frame := wrap(packet.TCP(way.flow.client, way.flow.vip, packet.Flags(flags)), packet.Encap{
				Kind: way.kind, Sender: sender, Segments: []netip.Addr{candidateSID(1, function, offer)},
			})
			s.do(func() error {
				runAgent(t, s.k, frame)
				return nil
			})
		}
		expect := func(what string, flags packet.TCPFlags, want bool) {
			t.Helper()
			if _, _, _, ok := s.sentReport(way.kind, way.flow, flags); ok != want {
				t.Errorf("%s, %v: %s: reported %v, want %v", way.kind, way.flow.vip, what, ok, want)
			}
		}
		setFlow(t, s.k, way.flow, way.kind, "", 0)
		send(balancer1, srv6.ConnectForce, srv6.Offer{Column: 3}, packet.SYN)
		expect("an offer without the question", packet.SYN|packet.ACK, false)
		send(balancer1, srv6.AckStickiness, wanting(srv6.Offer{}), packet.ACK)
		expect("ack-stickiness with it", packet.FIN|packet.ACK, true)

		setFlow(t, s.k, way.flow, way.kind, "", 0)
		send(balancer1, srv6.ConnectForce, wanting(srv6.Offer{}), packet.SYN)
		expect("an offer with the question", packet.SYN|packet.ACK, true)
		send(balancer1, srv6.AckStickiness, srv6.Offer{}, packet.ACK)
		expect("ack-stickiness without it", packet.FIN|packet.ACK, false)
	}
}

// What the first candidate told is reported only while it is recent.
func TestOldLoadOfTheFirstIsNotReported(t *testing.T) {
	s := newLeastStage(t)
	list := []netip.Addr{
		candidateSID(2, srv6.ConnectAvail, wanting(told(5, 4, 2))),
		candidateSID(1, srv6.ConnectAvail, wanting(srv6.Offer{Column: 1})),
	}
	for _, way := range leastWays {
		s.be(way.kind, 1, &accept.Load{Busy: 1, Capacity: 2})
		s.give(way.flow, offered(way.kind, way.flow, list, 1))
		tableOf(t, s.k).makeOlder(way.flow, 300*time.Millisecond)
		got, _, _, ok := s.sentReport(way.kind, way.flow, packet.SYN|packet.ACK)
		if !ok || got.First.Column != srv6.NoColumn || got.Load != 16 {
			t.Errorf("%s: 300 ms later, reported %+v, %v", way.kind, got, ok)
		}
	}
}

// The tag of a signal covers its report.
func TestTagsCoverReports(t *testing.T) {
	s := newLeastStage(t)
	key := desired.SignalKey{1, 2, 3}
	testhost.Must(t, datapath.SetSignalKeys(s.k.objects.SignalKeys, desired.SignalKeys{key}))
	for _, way := range leastWays {
		s.be(way.kind, 1, &accept.Load{Busy: 1, Capacity: 2})
		s.give(way.flow, offered(way.kind, way.flow,
			[]netip.Addr{candidateSID(1, srv6.ConnectForce, wanting(srv6.Offer{}))}, 0))
		_, argument, sid, ok := s.sentReport(way.kind, way.flow, packet.SYN|packet.ACK)
		want := packettest.Tag(key, srv6.CreateStickiness, netip.PrefixFrom(node, 64), argument, way.flow.client, way.flow.vip)
		if !ok || sid.Argument != want {
			t.Errorf("%s, %v: the tag is %#x, want %#x", way.kind, way.flow.vip, sid.Argument, want)
		}
	}
}

// The answer to a probe tells the server's clock.
func TestProbeAnswersTellTheClock(t *testing.T) {
	k := testKernel(t)
	_, out := runAgent(t, k, probeFor(desired.SRv6Encap, vip6.Addr()))
	clock := binary.BigEndian.Uint32(out[len(out)-4:])
	if clock>>31 != 1 {
		t.Fatalf("the clock is %#x", clock)
	}
	requireNow(t, clock&(1<<27-1))
}
