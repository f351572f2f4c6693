// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/packet"
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
	long := inspect.Packet{Flow: c.flow, Length: 8900}
	elsewhere := inspect.Packet{Flow: c.flow}
	elsewhere.Flow.Destination = netip.AddrPortFrom(c.flow.Destination.Addr(), 9)
	return append(all, long, elsewhere)
}

// quicPackets returns packets of QUIC that name each server, and one that names none, by service.
func (p *planes) quicPackets() map[string][]inspect.Packet {
	all := map[string][]inspect.Packet{}
	for i := range p.cfg.Services {
		s := &p.cfg.Services[i]
		if s.QUIC == nil {
			continue
		}
		servers, err := p.services.byName[s.Name].quicServers()
		p.must(err)
		for prefix := range servers {
			packet := inspect.Packet{Flow: flowTo(s.VIP, s.Port.Number(), s.Protocol), ConnectionID: prefix.Octets[:], Length: 120}
			all[s.Name] = append(all[s.Name], packet)
			packet.ConnectionID = bytes.Repeat([]byte{0xff}, len(packet.ConnectionID))
			all[s.Name] = append(all[s.Name], packet)
		}
	}
	return all
}

// A trace says of each packet what the switch then does with it: whether it forwards the packet, to
// which SID first, and under which reason it counts it.
func TestTraceAgreesWithSwitch(t *testing.T) {
	p := openPlanes(t)
	before, want := p.reasons(t), map[string]uint64{}
	trace := func(packet inspect.Packet) *p4switch.Trace {
		got := p4switch.TracePacket(t.Context(), &p.sw.To, packet, func(slot uint16) string { return fmt.Sprint(slot) })
		if got.Problem != "" {
			t.Fatal(got.Problem)
		}
		want[got.Reason]++
		return got
	}
	batches := p.quicPackets()
	for _, c := range cookieServices {
		if c.former == "" {
			batches[c.name] = tracedPackets(c)
		}
	}
	last := p.cfg.Services[len(p.cfg.Services)-1]
	for name, packets := range batches {
		var first []netip.Addr
		passed := 0
		for _, one := range packets {
			frame := tracedFrame(&one)
			if got := trace(one); got.Forwards() {
				first = append(first, got.Segments[0])
			} else {
				passed++
			}
			p.sw.Send(t, switchtest.Network, frame)
		}
		got := p.collect(t)
		if len(got[switchtest.Network]) != len(first) || len(got[switchtest.Host]) != passed {
			t.Fatalf("%s: %d frames are forwarded and %d passed, not %d and %d",
				name, len(got[switchtest.Network]), len(got[switchtest.Host]), len(first), passed)
		}
		for i, frame := range got[switchtest.Network] {
			if to := netip.AddrFrom16([16]byte(frame[14+24:])); to != first[i] {
				t.Errorf("%s: forwarded frame %d goes to %v, not %v", name, i, to, first[i])
			}
		}
		// The sentinels of collect.
		sentinel := inspect.Packet{Flow: flowTo(last.VIP, last.Port.Number(), desired.TCP), Opens: true, Echo: new(uint32), Length: 100}
		trace(sentinel)
		sentinel.Flow.Protocol, sentinel.Length = desired.UDP, 48
		trace(sentinel)
	}
	counted := p.reasons(t)
	maps.DeleteFunc(counted, func(reason string, n uint64) bool { return n == before[reason] })
	if !maps.Equal(counted, want) {
		t.Errorf("the switch counts %v, and the traces say %v", counted, want)
	}
	for _, reason := range []string{"forward_hunt", "forward_new", "forward_known", "forward_recover", "pass_no_service", "pass_too_big",
		"pass_no_server_id"} {
		if want[reason] == 0 {
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

// reasons returns the counters of the switch.
func (p *planes) reasons(t *testing.T) map[string]uint64 {
	t.Helper()
	counts, err := p.sw.Reasons(t.Context())
	p.must(err)
	byReason := map[string]uint64{}
	for _, count := range counts {
		byReason[count.Reason] = count.Packets
	}
	return byReason
}

// The rows of a switch are those of the data path's candidate tables, generation by generation.
func TestSwitchHasTheRowsOfTheDataPath(t *testing.T) {
	t.Parallel()
	var services []columnService
	for _, c := range cookieServices {
		c.crc = true
		services = append(services, c)
	}
	cfg := balancerOf(columnConfig(services, 0)...)
	cfg.Node.Switch = &desired.Switch{NetworkPort: 1, HostPort: 2}
	f := open(t, cfg)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	compared := 0
	for step := range cookieSteps {
		cfg.Services = columnConfig(services, step)
		f.mustApply(cfg)
		f.tellSwitch()
		for _, s := range (<-f.Contents()).Services {
			svc := f.services.byName[s.Name]
			entry := dataplane.ServiceEntry{Id: svc.id, Rule: svc.rule}
			if !f.plane.Holds(entry.Table(), s.Rows) {
				t.Errorf("step %d, %s: the switch gets other rows than those in the kernel", step, s.Name)
			}
			if s.Generation != svc.label.Generation || s.Digest != svc.label.Digest {
				t.Errorf("step %d, %s: generation %d, %08x", step, s.Name, s.Generation, s.Digest)
			}
			compared++
		}
	}
	if compared < 2*len(cookieSteps) {
		t.Errorf("%d generations were compared", compared)
	}
}
