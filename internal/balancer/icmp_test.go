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

// An ICMP error makes no entry, changes none, and is placed anew if the server of the entry was
// removed.
func TestICMPErrorsLeaveTheTableAlone(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	frame := packet.ICMPError(router6, 2, 0, 1280, reply(web))
	f.check(f.forwarded(frame, web, "web", f.placed(web, "web"), "forward_icmp"), f.run(frame))
	if slices.ContainsFunc(f.plane.Flows.Entries, func(e uint64) bool { return e != 0 }) {
		t.Error("an error has made an entry")
	}
	for name, slot := range map[string]uint32{
		"a free slot": 2*f.cfg.Node.Limits.Servers - 1, "another service's": f.slot("dns", "s1"),
	} {
		entry := entryOf(f.signature(web), slot, stateEstablished, f.now())
		f.bucket(web)[0] = entry
		f.check(f.forwarded(frame, web, "web", f.placed(web, "web"), "forward_icmp"), f.run(frame))
		if f.bucket(web)[0] != entry {
			t.Errorf("%s: the entry has changed", name)
		}
	}
	for _, state := range []dataplane.FlowState{stateNew, stateEstablished, stateSilent, stateClosing, stateClosed} {
		entry := entryOf(f.signature(web), f.slot("web", "s1"), state, f.now()-5)
		f.bucket(web)[0] = entry
		f.check(f.forwarded(frame, web, "web", "s1", "forward_icmp"), f.run(frame))
		if f.bucket(web)[0] != entry {
			t.Errorf("state %d: the entry has changed", state)
		}
	}
}

// An ICMP error about a flow of a service that hunts changes no entry, also if the flow is half-open.
func TestICMPErrorsConfirmNothing(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	parts := f.cast(web, "web")
	frame := packet.ICMPError(router6, 2, 0, 1280, reply(web))
	for _, state := range []string{"half-open first", "new first", "steer first", "closing first", "closed first", "stale first"} {
		f.setState(web, "web", state, parts)
		got := f.run(frame)
		if got.Reasons["forward_icmp"].Packets != 1 || got.Servers["web/"+parts[first]].Packets != 1 {
			t.Errorf("%s: %v, to %v", state, got.Reasons, got.Servers)
		}
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

// ICMP messages to a VIP that do not concern a flow.
func TestICMPRefused(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	error6 := func(quoted []byte) []byte { return packet.ICMPError(router6, 2, 0, 1280, quoted) }
	error4 := func(quoted []byte) []byte { return packet.ICMPError(router4, 3, 4, 1280, quoted) }
	fromOther6 := packet.ICMP(router6, vip6, 2, 0, 1280, packet.Payload(reply(toAll)[ethernetLength:]))
	fromOther4 := packet.ICMP(router4, vip4, 3, 4, 1280, packet.Payload(reply(noVIP4)[ethernetLength:]))
	fragments := packet.Fragments(reply(dns4, packet.Payload(make([]byte, 40))), 24, 9)
	const quote6, quote4 = 48, 28
	for name, v := range map[string]struct {
		frame  []byte
		reason string
	}{
		"echo reply":                       {packet.ICMP(client4.Addr(), vip4, 0, 0, 1), "drop_icmp_type"},
		"echo reply, IPv6":                 {packet.ICMP(client6.Addr(), vip6, 129, 0, 1), "drop_icmp_type"},
		"source quench":                    {packet.ICMPError(router4, 4, 0, 0, reply(web4)), "drop_icmp_type"},
		"redirect":                         {packet.ICMPError(router4, 5, 0, 0, reply(web4)), "drop_icmp_type"},
		"timestamp":                        {packet.ICMP(client4.Addr(), vip4, 13, 0, 1), "drop_icmp_type"},
		"reserved type":                    {packet.ICMPError(router6, 0, 0, 0, reply(web)), "drop_icmp_type"},
		"private type":                     {packet.ICMPError(router6, 100, 0, 0, reply(web)), "drop_icmp_type"},
		"neighbour solicitation":           {packet.ICMP(router6, vip6, 135, 0, 0), "drop_icmp_type"},
		"seven bytes":                      {set(error6(reply(web)), 4, 7), "drop_transport"},
		"seven bytes, IPv4":                {set(error4(reply(web4)), 2, 27), "drop_transport"},
		"no quote":                         {set(error6(reply(web)), 4, 8), "drop_icmp_quote"},
		"quote of another VIP's packet":    {fromOther6, "drop_icmp_quote"},
		"quote of no VIP's packet":         {fromOther4, "drop_icmp_quote"},
		"quote of the client's packet":     {packet.ICMP(router6, vip6, 2, 0, 1280, packet.Payload(frameOf(web)[ethernetLength:])), "drop_icmp_quote"},
		"quote of the other version":       {packet.ICMP(router6, vip6, 2, 0, 1280, packet.Payload(reply(web4)[ethernetLength:])), "drop_icmp_quote"},
		"quote of version 5":               {setByte(error4(reply(web4)), quote4, 0x55), "drop_icmp_quote"},
		"quoted header of 16 bytes":        {setByte(error4(reply(web4)), quote4, 0x44), "drop_icmp_quote"},
		"quote of a later fragment":        {error4(fragments[1]), "drop_icmp_quote"},
		"quote of a ping's reply":          {error6(packet.ICMP(vip6, client6.Addr(), 129, 0, 1)), "drop_icmp_quote"},
		"quote of nine extension headers":  {error6(reply(web, slices.Repeat([]packet.Option{packet.DestinationOptions(8)}, 9)...)), "drop_icmp_quote"},
		"quoted extension header too long": {setByte(error6(reply(web, packet.HopByHop(8))), quote6+41, 9), "drop_icmp_quote"},
		"port without a service":           {error6(reply(flowTo(vip6, 8080, desired.TCP))), "drop_icmp_no_service"},
		"protocol without a service":       {error4(reply(flowTo(vip4, 80, desired.UDP))), "drop_icmp_no_service"},
		"flow without a server":            {error6(reply(drained)), "drop_no_server"},
		"flow without a next hop":          {error6(reply(unrouted)), "drop_no_next_hop"},
	} {
		t.Run(name, func(t *testing.T) {
			f.t = t
			f.check(refused(v.frame, v.reason, layer3(v.frame)), f.run(v.frame))
		})
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

// An ICMP error quotes the packet as it arrived, up to the permitted length of errors. Its
// checksums are correct for all lengths.
func TestErrorsQuoteThePacket(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for _, flow := range []dataplane.Flow{web, web4} {
		for size := range 1300 {
			payload := make([]byte, size)
			for i := range payload {
				payload[i] = byte(i*7 + size)
			}
			frame := packet.Pad(frameOf(flow, packet.HopLimit(1), packet.Payload(payload)), 1, 2, 3)
			got := f.run(frame)
			if want := answered(frame, "answer_hop_limit", 0); !same(want, got) {
				t.Fatalf("payload of %d bytes: %+v, want %+v", size, got, want)
			}
			if err := packet.Verify(got.Frame); err != nil {
				t.Fatalf("payload of %d bytes: %v", size, err)
			}
		}
	}
}

// No error is sent about a packet whose source is not a single host.
func TestNoErrorToManyOrNobody(t *testing.T) {
	t.Parallel()
	f := openStandard(t)
	for source, told := range map[string]bool{
		"0.0.0.0": false, "0.1.2.3": false, "1.0.0.0": true, "127.0.0.1": false, "223.255.255.255": true,
		"224.0.0.1": false, "240.0.0.1": false, "255.255.255.255": false,
		"::": false, "::1": false, "::2:3": false, "::ffff:192.0.2.1": false, "ff02::1": false, "ffff::1": false,
		"0:0:0:1::": true, "64:ff9b::192.0.2.1": true, "fe80::1": true, "2001:db8::": true,
	} {
		address := netip.MustParseAddr(source)
		vip := vip6
		if address.Is4() {
			vip = vip4
		}
		flow := flowTo(vip, 80, desired.TCP)
		flow.Source = netip.AddrPortFrom(address, 40000)
		frame := frameOf(flow, packet.HopLimit(1))
		want := refused(frame, "drop_hop_limit", layer3(frame))
		if told {
			want = answered(frame, "answer_hop_limit", 0)
		}
		if got := f.run(frame); !same(want, got) {
			t.Errorf("from %s: %+v, want %+v", source, got, want)
		}
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
