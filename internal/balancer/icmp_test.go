// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"math"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/packet"
)

// routerOf returns the address of a router on the path to the clients of a VIP.
func routerOf(vip netip.Addr) netip.Addr {
	if vip.Is4() {
		return router4
	}
	return router6
}

// An ICMP error about a flow of a service that hunts changes no entry, also if the flow is half-open.
func TestICMPErrorsConfirmNothing(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	frame := packet.ICMPError(router6, 2, 0, 1280, reply(web))
	for _, state := range []string{"half-open first", "new first", "steer first", "closing first", "closed first"} {
		f.setState(web, "web", state, parts)
		f.run(frame)
		if got := f.state(web, "web", parts); got != state {
			t.Errorf("%s becomes %s", state, got)
		}
	}
}

// An ICMP error about a flow that is observed does not count as a packet of the client.
func TestICMPErrorsAreNotObserved(t *testing.T) {
	t.Parallel()
	cfg := inferring(manyServers(4)...)
	svc := &cfg.Services[0]
	svc.Persistence, svc.Probe = desired.PersistenceStateless, new(true)
	svc.Infer.Among, svc.History, svc.Generations = desired.AmongCandidates, 3, 32
	r := openRanked(t, cfg, 1024, 1)
	answered := func() (n uint32) {
		for _, slot := range r.services.byName["web"].slots() {
			n += r.plane.Loads.Counters(slot).Answered
		}
		return n
	}
	r.exec(frameOf(r.flows[0]), nil)
	r.exec(packet.ICMPError(routerOf(svc.VIP), 1, 0, 0, reply(r.flows[0])), nil)
	if n := answered(); n != 0 {
		t.Errorf("after an error, %d flows count as established", n)
	}
	r.exec(frameOf(r.flows[0], packet.Flags(packet.PSH|packet.ACK)), nil)
	if n := answered(); n != 1 {
		t.Errorf("after a packet of the client, %d flows count as established", n)
	}
}

// The flow of a quoted packet is found however much of the packet a router quotes, if the quotation
// contains the ports and the bytes that RFC 792 requires.
func TestICMPQuotes(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	later := packet.Flags(packet.ACK)
	for name, v := range map[string]struct {
		flow   dataplane.Flow
		quoted []byte
		ports  int // bytes before the ports
	}{
		"TCP over IPv4":     {web4, reply(web4, later, packet.Payload(make([]byte, 1400))), 20},
		"UDP over IPv4":     {dns4, reply(dns4, packet.Payload(make([]byte, 20))), 20},
		"IPv4 options":      {web4, reply(web4, packet.IPOptions(make([]byte, 40))), 60},
		"first fragment":    {dns4, packet.Fragments(reply(dns4, packet.Payload(make([]byte, 40))), 24, 9)[0], 20},
		"TCP over IPv6":     {web, reply(web, later, packet.Payload(make([]byte, 1400))), 40},
		"UDP over IPv6":     {dns, reply(dns), 40},
		"extension headers": {web, reply(web, packet.HopByHop(16), packet.DestinationOptions(24)), 80},
		"atomic fragment":   {web, packet.Fragments(reply(web), 64, 9)[0], 48},
	} {
		t.Run(name, func(t *testing.T) {
			f.t = t
			whole := packet.ICMPError(routerOf(v.flow.Destination.Addr()), 3, 1, 0, v.quoted)
			service := map[dataplane.Flow]string{web: "web", web4: "web4", dns: "dns", dns4: "dns4"}[v.flow]
			header := len(whole) - ethernetLength - min(len(v.quoted)-ethernetLength, quotable(whole))
			for length := header; length <= len(whole)-ethernetLength; length++ {
				frame := shorten(whole, length)
				want := refused(frame, "drop_icmp_quote", uint64(length))
				if length >= header+v.ports+8 {
					want = f.forwarded(frame, v.flow, service, f.placed(v.flow, service), "forward_icmp")
				}
				if got := f.run(frame); !same(want, got) {
					t.Fatalf("%d bytes of quote: %+v, want %+v", length-header, got, want)
				}
			}
		})
	}
}

// quotable returns how many bytes an ICMP error of the frame's IP version quotes at most.
func quotable(frame []byte) int {
	if frame[ethernetLength]>>4 == 4 {
		return 576 - 28
	}
	return 1280 - 48
}

// shorten cuts the packet of a frame to the given bytes of layer 3, and adapts its length field.
func shorten(frame []byte, length int) []byte {
	return withLength(frame[:ethernetLength+length], length)
}

// solicitation is a neighbour solicitation from a router to an address that the router knows
// already, which finds out whether a host still has the address (RFC 4861 section 7.3.3).
func solicitation(target netip.Addr) []byte {
	return packet.ICMP(router6, target, 135, 0, 0, packet.HopLimit(255), packet.Payload(target.AsSlice()))
}

// icmpCaptures are ICMP messages to a VIP that do not concern a flow.
func icmpCaptures() [][]byte {
	error6 := func(quoted []byte) []byte { return packet.ICMPError(router6, 2, 0, 1280, quoted) }
	error4 := func(quoted []byte) []byte { return packet.ICMPError(router4, 3, 4, 1280, quoted) }
	fromOther6 := packet.ICMP(router6, vip6, 2, 0, 1280, packet.Payload(reply(toAll)[ethernetLength:]))
	fromOther4 := packet.ICMP(router4, vip4, 3, 4, 1280, packet.Payload(reply(noVIP4)[ethernetLength:]))
	fragments := packet.Fragments(reply(dns4, packet.Payload(make([]byte, 40))), 24, 9)
	const quote6, quote4 = 48, 28
	return [][]byte{
		packet.ICMP(client4.Addr(), vip4, 0, 0, 1),       // echo reply
		packet.ICMP(client6.Addr(), vip6, 129, 0, 1),     // echo reply, IPv6
		packet.ICMPError(router4, 4, 0, 0, reply(web4)),  // source quench
		packet.ICMPError(router4, 5, 0, 0, reply(web4)),  // redirect
		packet.ICMP(client4.Addr(), vip4, 13, 0, 1),      // timestamp
		packet.ICMPError(router6, 0, 0, 0, reply(web)),   // reserved type
		packet.ICMPError(router6, 100, 0, 0, reply(web)), // private type
		packet.ICMP(router6, vip6, 135, 0, 0),            // forwarded neighbour solicitation
		solicitation(vip6),
		set(error6(reply(web)), 4, 7),   // seven bytes
		set(error4(reply(web4)), 2, 27), // seven bytes, IPv4
		set(error6(reply(web)), 4, 8),   // no quote
		fromOther6,                      // quote of another VIP's packet
		fromOther4,                      // quote of no VIP's packet
		packet.ICMP(router6, vip6, 2, 0, 1280, packet.Payload(frameOf(web)[ethernetLength:])), // quote of the client's packet
		packet.ICMP(router6, vip6, 2, 0, 1280, packet.Payload(reply(web4)[ethernetLength:])),  // quote of the other version
		setByte(error4(reply(web4)), quote4, 0x55),                                            // quote of version 5
		setByte(error4(reply(web4)), quote4, 0x44),                                            // quoted header of 16 bytes
		error4(fragments[1]), // quote of a later fragment
		error6(packet.ICMP(vip6, client6.Addr(), 129, 0, 1)),                                   // quote of a ping's reply
		error6(reply(web, slices.Repeat([]packet.Option{packet.DestinationOptions(8)}, 9)...)), // quote of nine extension headers
		setByte(error6(reply(web, packet.HopByHop(8))), quote6+41, 9),                          // quoted extension header too long
		error6(reply(flowTo(vip6, 8080, desired.TCP))),                                         // port without a service
		error4(reply(flowTo(vip4, 80, desired.UDP))),                                           // protocol without a service
		error6(reply(drained)),  // flow without a server
		error6(reply(unrouted)), // flow without a next hop
	}
}

// A ping of any length is answered as the host that has the address would. A ping is not answered
// if it is incomplete, or if the answer needs more than to turn the packet around.
func TestEcho(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	ping := func(version int, options ...packet.Option) []byte {
		if version == 4 {
			return packet.ICMP(client4.Addr(), vip4, 8, 0, 0x12345678, options...)
		}
		return packet.ICMP(client6.Addr(), vip6, 128, 0, 0x12345678, options...)
	}
	for _, version := range []int{4, 6} {
		for _, size := range []int{0, 1, 56, 1400} {
			frame := ping(version, packet.Payload(make([]byte, size)), packet.HopLimit(3))
			got := f.run(frame)
			f.check(sentBack(frame, "answer_echo", packet.EchoReply(frame, 64)), got)
			if err := packet.Verify(got.Frame); err != nil {
				t.Errorf("IPv%d, %d bytes: %v", version, size, err)
			}
		}
		for _, sum := range []uint16{0, 1, 0x07ff, 0x0800, 0xf7ff, 0xfeff, 0xffff} {
			frame := set(ping(version), map[int]int{4: 20, 6: 40}[version]+2, sum)
			f.check(sentBack(frame, "answer_echo", packet.EchoReply(frame, 64)), f.run(frame))
		}
	}
	for name, frame := range map[string][]byte{
		"IPv4 options":      ping(4, packet.IPOptions(make([]byte, 4))),
		"extension headers": ping(6, packet.DestinationOptions(8)),
		"from multicast":    packet.ICMP(netip.MustParseAddr("224.0.0.1"), vip4, 8, 0, 1),
		"from nowhere":      packet.ICMP(netip.IPv6Unspecified(), vip6, 128, 0, 1),
	} {
		t.Run(name, func(t *testing.T) {
			f.t = t
			f.check(refused(frame, "drop_icmp_type", layer3(frame)), f.run(frame))
		})
	}
}

// A client is never told to send packets shorter than the length that every link must support. It
// is told nothing if its packet is not longer than that, because it could not send shorter ones.
func TestLeastMTU(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, v := range []struct {
		flow       dataplane.Flow
		mtu, least int // of the path, with and without the encapsulation
		told       uint32
	}{
		{narrow, 1280 + 40 + 1, 1281, 1281},
		{narrow, 1280 + 40, 1280, 1280},
		{narrow, 1280, 1280, 1280},
		{narrow, 30, 1280, 1280},
		{web4, 68 + 40 + 1, 69, 69},
		{web4, 68 + 40, 68, 68},
		{web4, 60, 68, 68},
		{web4, 30, 68, 68},
	} {
		for target, hop := range f.hops {
			hop.Link.MTU = v.mtu
			f.hops[target] = hop
		}
		f.applyHops()
		headers := len(frameOf(v.flow)) - ethernetLength
		longer := frameOf(v.flow, packet.Payload(make([]byte, v.least+1-headers)))
		f.check(answered(longer, "answer_too_big", v.told), f.run(longer))
		if v.mtu-40 < v.least {
			shortest := frameOf(v.flow, packet.Payload(make([]byte, v.least-headers)))
			f.check(refused(shortest, "drop_too_big", uint64(v.least)), f.run(shortest))
		}
	}
}

// Each core may send a number of answers in a row, and then a number per second, separately for
// errors and replies. Packets that are not answered have a counter of their own, and stay
// unchanged.
func TestAnswerRate(t *testing.T) {
	f := openStandard(t)
	expired := frameOf(web, packet.HopLimit(1))
	ping := packet.ICMP(client4.Addr(), vip4, 8, 0, 1)
	for _, v := range []struct {
		frame  []byte
		reason string
	}{{expired, "answer_hop_limit"}, {ping, "answer_echo"}} {
		t.Run(v.reason, func(t *testing.T) {
			f.t = t
			done := make(chan map[string]tally)
			start := time.Now()
			go func() {
				pin(t, 0)
				f.refill()
				before := f.counters()
				for range 300 {
					if _, _, err := f.plane.Objects.XdpLb.Test(v.frame); err != nil {
						t.Error(err)
					}
				}
				done <- difference(before.reasons, f.counters().reasons)
			}()
			got := <-done
			meanwhile := uint64(time.Since(start).Milliseconds()) + 10 // one jiffy
			answered, refused := got[v.reason].Packets, got["drop_rate_limit"].Packets
			if answered < 100 || answered > 100+meanwhile || answered+refused != 300 {
				t.Errorf("%d answered and %d not of 300, want 100 and %d at most for which there was time", answered, refused, meanwhile)
			}
		})
	}
	f.setAnswered(math.MaxInt64)
	for _, frame := range [][]byte{expired, ping} {
		verdict, out, err := f.plane.Objects.XdpLb.Test(frame)
		f.must(err)
		if verdict != verdictDrop || !slices.Equal(frame, out) {
			t.Errorf("verdict %d, want a drop and the frame as it was", verdict)
		}
	}
}

// An answer leaves by XDP_TX, unless the frame arrived on a veth, whose peer might not run XDP.
func TestAnswersGoBack(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	frame := packet.ICMP(client4.Addr(), vip4, 8, 0, 1)
	want := sentBack(frame, "answer_echo", packet.EchoReply(frame, 64))
	for kind, verdict := range map[string]uint32{"veth": verdictRedirect, "device": verdictTX} {
		f.must(f.plane.Sides[0].SetHost(nexthop.Link{Index: 1, Type: kind, MAC: ownMAC}))
		want.Verdict = verdict
		f.check(want, f.run(frame))
	}
}
