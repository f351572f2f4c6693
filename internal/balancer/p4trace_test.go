// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// tracedPackets returns packets of a service of all kinds that a trace can have.
func tracedPackets(c columnService) (all []inspect.Packet) {
	for port := range uint16(6) {
		flow := fromPort(c.flow, port)
		all = append(all, inspect.Packet{Flow: flow, Opens: true}, inspect.Packet{Flow: flow},
			inspect.Packet{Flow: flow, Opens: true, Echo: new(uint32)})
		for column := range uint32(c.candidates) + 1 {
			all = append(all, inspect.Packet{Flow: flow, Echo: new(0xabcde000 | column)})
		}
	}
	long := inspect.Packet{Flow: c.flow, Length: 1480}
	elsewhere := inspect.Packet{Flow: c.flow}
	elsewhere.Flow.Destination = netip.AddrPortFrom(c.flow.Destination.Addr(), 9)
	return append(all, long, elsewhere)
}

// quicPackets returns packets of QUIC that name each server, and one that names none.
func (f *fixture) quicPackets() (all []inspect.Packet) {
	for i := range f.cfg.Services {
		s := &f.cfg.Services[i]
		if s.QUIC == nil {
			continue
		}
		servers, err := f.services.byName[s.Name].quicServers()
		f.must(err)
		for prefix := range servers {
			named := inspect.Packet{Flow: flowTo(s.VIP, s.Port.Number(), s.Protocol), ConnectionID: prefix.Octets[:], Length: 120}
			unnamed, short := named, named
			unnamed.ConnectionID = bytes.Repeat([]byte{0xff}, len(prefix.Octets))
			short.Length = 64
			all = append(all, named, unnamed, short)
		}
	}
	return all
}

// A trace says of each packet what the switch then does with it: whether it forwards the packet, to
// which SID first, and under which reason it counts it.
func TestTraceAgreesWithSwitch(t *testing.T) {
	t.Parallel()
	testhost.NeedSwitch(t)
	withAndWithoutHints(t, testTraceAgrees)
}

func testTraceAgrees(t *testing.T, capacity uint32) {
	r := openOffloaded(t, capacity)
	r.run(frameOf(web)) // opens the mirror
	packets := r.quicPackets()
	for _, c := range cookieServices {
		if c.former == "" {
			packets = append(packets, tracedPackets(c)...)
		}
	}
	nameOf := func(slot uint16) string { return fmt.Sprint(slot) }
	seen := map[string]int{}
	for _, packet := range packets {
		frame := tracedFrame(&packet)
		trace := p4switch.TracePacket(t.Context(), &r.mirror.sw.To, packet, nameOf)
		r.run(frame)
		last := &r.mirror.last
		if trace.Reason != last.reason {
			t.Errorf("%v: the trace says %s (%s), and the switch %s", packet, trace.Reason, trace.Problem, last.reason)
		}
		if trace.Forwards() {
			if to := netip.AddrFrom16([16]byte(last.frame[14+24:])); to != trace.Segments[0] {
				t.Errorf("%v: the trace says %v, and the switch sends to %v", packet, trace.Segments[0], to)
			}
		}
		seen[trace.Reason]++
	}
	for _, reason := range []string{"forward_hunt", "forward_new", "forward_known", "forward_recover", "pass_no_service", "pass_too_big",
		"pass_protocol", "pass_no_server_id", "pass_no_cookie"} {
		if isPossible := reason != "pass_no_cookie" || capacity > 0; isPossible && seen[reason] == 0 {
			t.Errorf("no packet has the reason %s", reason)
		}
	}
}

// tracedFrame returns the frame of a packet, and sets the length of the packet if it is 0.
func tracedFrame(p *inspect.Packet) []byte {
	if p.ConnectionID != nil {
		payload := make([]byte, p.Length-len(frameOf(p.Flow))+14)
		copy(payload, shortHeader(p.ConnectionID))
		return frameOf(p.Flow, packet.Payload(payload))
	}
	options := []packet.Option{packet.Flags(packet.ACK)}
	if p.Opens {
		options[0] = packet.Flags(packet.SYN)
	}
	if p.Echo != nil {
		options = append(options, packet.Timestamps(1, *p.Echo))
	}
	frame := frameOf(p.Flow, options...)
	if more := p.Length - (len(frame) - 14); more > 0 {
		frame = frameOf(p.Flow, append(options, packet.Payload(make([]byte, more)))...)
	}
	p.Length = len(frame) - 14
	return frame
}
