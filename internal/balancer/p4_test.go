// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	p4v1 "github.com/p4lang/p4runtime/go/p4/v1"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
)

// otherMAC is the balancer that gets what the switch does not handle.
var otherMAC = packet.MAC{2, 0, 0, 0, 0, 9}

// planes are the data path of this package and a switch with the same services.
type planes struct {
	*fixture
	sw    *switchtest.Switch
	count int // of sentinels
	// forwarded and punted count packets by the reason of the data path.
	forwarded, punted map[string]int
}

// openPlanes returns both planes with all kinds of services that switches balance. Their servers
// have changed several times.
func openPlanes(t testing.TB) *planes {
	t.Helper()
	sw := switchtest.Start(t)
	var services []columnService
	for _, c := range cookieServices {
		if c.former == "" {
			c.crc = true
			services = append(services, c)
		}
	}
	cfg := balancerOf(columnConfig(services, 0)...)
	cfg.Node.Limits.Hints = 0
	f := open(t, cfg)
	takeColumnSteps(f, cfg, services)
	f.route()
	p := &planes{fixture: f, sw: sw, forwarded: map[string]int{}, punted: map[string]int{}}
	f.must(sw.Write(t.Context(), p.updates()))
	return p
}

// updates are the entries of a switch that balances as the data path does.
func (p *planes) updates() (updates []p4switch.Update) {
	add := func(e p4switch.Entry) {
		kind := p4v1.Update_INSERT
		if len(e.Key) == 0 {
			kind = p4v1.Update_MODIFY
		}
		updates = append(updates, p4switch.Update{Kind: kind, Entry: e})
	}
	number := p4switch.Number
	add(p4switch.Entry{Table: "ports", Key: []p4switch.Value{number(switchtest.Network)}, Action: "from_network",
		Params: []p4switch.Value{number(switchtest.Host), ownMAC[:]}})
	add(p4switch.Entry{Table: "ports", Key: []p4switch.Value{number(switchtest.Host)}, Action: "from_host",
		Params: []p4switch.Value{number(switchtest.Network)}})
	source := p.cfg.Node.Locator.Addr().As16()
	add(p4switch.Entry{Table: "source", Action: "set_source", Params: []p4switch.Value{source[:]}})
	add(p4switch.Entry{Table: "balancer", Action: "to_balancer",
		Params: []p4switch.Value{number(switchtest.Other), otherMAC[:], ownMAC[:]}})
	vips := map[netip.Addr]uint16{}
	for _, svc := range p.services.byName {
		s := p.serviceOf(svc, vips)
		for slot := range s.Servers {
			server := p.serverOf(slot)
			for e := range server.Entries() {
				add(e)
			}
		}
		for e := range s.Entries() {
			add(e)
		}
		add(s.Match())
	}
	for vip, n := range vips {
		address := vip.As16()
		add(p4switch.Entry{Table: "vips", Key: []p4switch.Value{address[:]}, Action: "set_vip",
			Params: []p4switch.Value{number(uint64(n))}})
	}
	return updates
}

// serviceOf returns a service as the switch gets it. vips has the numbers of the VIPs so far.
func (p *planes) serviceOf(svc *service, vips map[netip.Addr]uint16) *p4switch.Service {
	if _, ok := vips[svc.VIP]; !ok {
		vips[svc.VIP] = uint16(len(vips) + 1)
	}
	rows, err := p.services.built.build(svc.builtFrom)
	p.must(err)
	s := &p4switch.Service{
		Service: svc.Service, Number: uint16(svc.id), VIP: vips[svc.VIP], Rows: rows,
		Sets: int(svc.rule.Generations()), Servers: map[uint16]p4switch.Condition{},
	}
	for _, m := range svc.members {
		flags := p.plane.Servers.Flags(m.slot)
		c := p4switch.Condition{
			Takes:     p.plane.Servers.TakesFlows(m.slot),
			Reachable: p.plane.Servers.HasNextHop(m.slot) && flags&dataplane.FlagUnreachable == 0,
			Failing:   flags&dataplane.FlagFailing != 0,
		}
		s.Servers[uint16(m.slot)] = c
		s.TakesFlows = s.TakesFlows || c.Takes
	}
	return s
}

func (p *planes) serverOf(slot uint16) *p4switch.Server {
	s := &p4switch.Server{Slot: slot, Locator: p.plane.Servers.Address(uint32(slot))}
	mac, port, ok := p.plane.Servers.NextHop(uint32(slot))
	if !ok {
		return s
	}
	for name, index := range p.ifindex {
		if index == p.plane.Ports.Ifindex(port) {
			s.Hop = p4switch.NextHop{Port: switchtest.Network, MAC: mac, Own: p.macs[name], MTU: uint16(links[name])}
		}
	}
	return s
}

// compare passes frames to both planes.
func (p *planes) compare(t *testing.T, frames [][]byte) {
	t.Helper()
	want := map[int][][]byte{}
	for _, frame := range frames {
		if isTagged(frame) {
			continue // the sockets of the test would get it without its tag
		}
		o := p.run(frame)
		if port, out := p.expected(frame, o); port != 0 {
			want[port] = append(want[port], out)
		}
		p.sw.Send(t, switchtest.Network, frame)
	}
	got := p.collect(t)
	for port := range want {
		if diff := firstDifference(want[port], got[port]); diff != "" {
			t.Fatalf("port %d: %s\nof these frames: %x", port, diff, frames)
		}
	}
}

// expected returns what the switch must do with a frame that the data path has handled so: the port
// and the frame. Port 0: it drops the frame.
func (p *planes) expected(frame []byte, o outcome) (port int, out []byte) {
	reason := reasonOf(o)
	switch {
	case strings.HasPrefix(reason, "pass_"):
		return switchtest.Host, frame
	case reason == "drop_group_source", reason == "drop_tcp_flags", reason == "drop_no_next_hop" && isWholeTCP(frame):
		return 0, nil
	case strings.HasPrefix(reason, "forward_") && isWholeTCP(frame):
		p.forwarded[reason]++
		return switchtest.Network, withoutLabel(o.Frame)
	}
	p.punted[reason]++
	return switchtest.Other, packet.SetMACs(slices.Clone(frame), ownMAC, otherMAC)
}

// isTagged tells whether a frame has a VLAN tag.
func isTagged(frame []byte) bool {
	ethertype := binary.BigEndian.Uint16(frame[12:])
	return ethertype == 0x8100 || ethertype == 0x88a8
}

// isWholeTCP tells whether a frame has a TCP header directly behind its IP header, and is no
// fragment.
func isWholeTCP(frame []byte) bool {
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		return frame[14+9] == 6 && binary.BigEndian.Uint16(frame[14+6:])&0x3fff == 0
	case 0x86dd:
		return frame[14+6] == 6
	}
	return false
}

// withoutLabel clears the flow label of an outer header: both planes take it from a hash of the
// flow, and not from the same one.
func withoutLabel(frame []byte) []byte {
	frame = slices.Clone(frame)
	if binary.BigEndian.Uint16(frame[12:]) == 0x86dd && (frame[14+6] == 41 || frame[14+6] == 4 ||
		frame[14+6] == 43 && (frame[54] == 41 || frame[54] == 4)) {
		frame[15] &= 0xf0
		frame[16], frame[17] = 0, 0
	}
	return frame
}

// collect returns the frames that left by each port. It sends a sentinel to each port: what has left
// by a port before its sentinel is all.
func (p *planes) collect(t *testing.T) map[int][][]byte {
	t.Helper()
	p.count++
	mark := fmt.Appendf(nil, "sentinel %d", p.count)
	vip := p.cfg.Services[0].VIP
	flow := flowTo(vip, p.cfg.Services[0].Port.Number(), desired.TCP)
	p.sw.Send(t, switchtest.Network, frameOf(flow, packet.Timestamps(1, 0), packet.Payload(mark)))
	p.sw.Send(t, switchtest.Network, frameOf(flowTo(vip, 9, desired.UDP), packet.Payload(mark)))
	p.sw.Send(t, switchtest.Network, append(slices.Concat(ownMAC[:], otherMAC[:], []byte{0x88, 0xb5}), mark...))
	got := map[int][][]byte{}
	for _, port := range []int{switchtest.Network, switchtest.Host, switchtest.Other} {
		for {
			frame := p.sw.Receive(t, port)
			if bytes.HasSuffix(frame, mark) {
				break
			}
			if port == switchtest.Network {
				frame = withoutLabel(frame)
			}
			got[port] = append(got[port], frame)
		}
	}
	return got
}

// firstDifference describes the first frame in which two lists differ. It is empty if they are
// equal.
func firstDifference(want, got [][]byte) string {
	for i := range max(len(want), len(got)) {
		var w, g []byte
		if i < len(want) {
			w = want[i]
		}
		if i < len(got) {
			g = got[i]
		}
		if !bytes.Equal(w, g) {
			return fmt.Sprintf("frame %d of %d is\n%x\nnot, of %d,\n%x", i, len(got), g, len(want), w)
		}
	}
	return ""
}

// A switch sends each packet as the data path does, byte for byte, or gives it to another balancer.
func TestSwitchAgreesWithDataPath(t *testing.T) {
	p := openPlanes(t)
	var frames [][]byte
	for _, frame := range captures() {
		if len(frame) >= 14 && !bytes.Contains(frame, p.cfg.Node.Locator.Addr().AsSlice()[:8]) {
			frames = append(frames, frame)
		}
	}
	for part := range slices.Chunk(frames, 30) {
		p.compare(t, part)
	}
	for seed := range uint64(300) {
		frame := frames[int(seed)%len(frames)]
		p.compare(t, packettest.Mutants(frame, seed+1, 15, frames))
	}
	t.Logf("forwarded %v, punted %v", p.forwarded, p.punted)
}
