// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/srv6"
)

// planes are the data path of this package and a switch with the same services.
type planes struct {
	*fixture
	sw    *switchtest.Switch
	count int // of sentinels
	// forwarded and passed count packets by the reason of the data path.
	forwarded, passed map[string]int
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
	var quic []desired.Service
	for _, q := range quicServices {
		if !q.kind.IsTunnel() && !q.former {
			quic = append(quic, q.service(false))
		}
	}
	cfg := balancerOf(append(quic, columnConfig(services, 0)...)...)
	cfg.Node.Limits.Hints = 0
	cfg.Node.Switch = &desired.Switch{NetworkPort: switchtest.Network, HostPort: switchtest.Host}
	f := open(t, cfg)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	takeColumnSteps(f, cfg, services)
	delete(f.via, "m4") // the switch reaches all servers by one interface
	f.route()
	p := &planes{fixture: f, sw: sw, forwarded: map[string]int{}, passed: map[string]int{}}
	controller, err := p4switch.Open(t.Context(), sw.Client)
	f.must(err)
	f.tellSwitch()
	f.must(controller.Sync(t.Context(), <-f.Contents()))
	return p
}

// compare passes frames to both planes.
func (p *planes) compare(t *testing.T, frames [][]byte) {
	t.Helper()
	want := map[int][][]byte{}
	for _, frame := range frames {
		if isTagged(frame) || isLongSYN(frame) {
			continue
		}
		port, out := p.expected(frame, p.run(frame))
		want[port] = append(want[port], out)
		p.sw.Send(t, switchtest.Network, frame)
	}
	got := p.collect(t)
	for port := range want {
		if diff := firstDifference(want[port], got[port]); diff != "" {
			t.Fatalf("port %d: %s\nof these frames: %x", port, diff, frames)
		}
	}
}

// expected returns the port by which the switch must send a frame that the data path has handled so,
// and the frame that it must send. It passes all packets to the host that it does not balance.
func (p *planes) expected(frame []byte, o outcome) (port int, out []byte) {
	reason := reasonOf(o)
	if isQUIC(o) {
		reason = "quic " + reason
	}
	if reason == "quic forward_known" && hasShortHeader(frame) ||
		strings.HasPrefix(reason, "forward_") && isWholeTCP(frame) {
		p.forwarded[reason]++
		return switchtest.Network, withoutLabel(o.Frame)
	}
	p.passed[reason]++
	return switchtest.Host, frame
}

// isLongSYN tells whether a frame may be a SYN that does not fit its path with all candidates. The
// switch passes it to the host, and the data path offers it to fewer candidates.
func isLongSYN(frame []byte) bool { return len(frame) > 1300 }

// isTagged tells whether a frame has a VLAN tag, which the sockets of the test would not show.
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

// hasShortHeader tells whether a frame has a packet of QUIC with a short header directly behind its IP
// header, is no fragment, and has all octets that the switch reads.
func hasShortHeader(frame []byte) bool {
	var udp []byte
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		if frame[14+9] == 17 && binary.BigEndian.Uint16(frame[14+6:])&0x3fff == 0 {
			udp = frame[14+4*(frame[14]&0xf):]
		}
	case 0x86dd:
		if frame[14+6] == 17 {
			udp = frame[14+40:]
		}
	}
	return len(udp) >= 8+17 && udp[8]&0x80 == 0
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
	svc := p.cfg.Services[len(p.cfg.Services)-1] // of TCP
	vip := svc.VIP
	flow := flowTo(vip, svc.Port.Number(), desired.TCP)
	p.sw.Send(t, switchtest.Network, frameOf(flow, packet.Timestamps(1, 0), packet.Payload(mark)))
	p.sw.Send(t, switchtest.Network, frameOf(flowTo(vip, 9, desired.UDP), packet.Payload(mark)))
	got := map[int][][]byte{}
	for _, port := range []int{switchtest.Network, switchtest.Host} {
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

// A switch sends each packet as the data path does, byte for byte, or passes it to the host.
func TestSwitchAgreesWithDataPath(t *testing.T) {
	p := openPlanes(t)
	var frames [][]byte
	for _, c := range cookieServices {
		if c.former == "" {
			for port := range uint16(8) {
				frames = append(frames, cookiePackets(fromPort(c.flow, port), c.candidates)...)
			}
			frames = append(frames, c.unusual()...)
		}
	}
	frames = append(frames, quicCaptures()...)
	packettest.TryMutants(t, "FuzzDataPath", append(frames, icmpCaptures()...), p.compare, func() (missing []string) {
		for _, reason := range []string{
			"forward_known", "forward_new", "forward_hunt", "forward_recover", "quic forward_known",
		} {
			if p.forwarded[reason] == 0 {
				missing = append(missing, reason)
			}
		}
		return missing
	})
	t.Logf("forwarded %v, passed %v", p.forwarded, p.passed)
}

// The switch is told what has changed for its services, and nothing else. It gets only services that
// it can balance.
func TestSwitchIsTold(t *testing.T) {
	t.Parallel()
	crc := byCRC(stateless(desired.PlacementHunt, 2))
	crc.Services[0].BucketHash, crc.Services[0].Buckets = desired.BucketHashMultilinear, 251
	crc.Node.Switch = &desired.Switch{NetworkPort: 1, HostPort: 2}
	f := open(t, crc)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	told := func(what string, isNews bool) *p4switch.Content {
		t.Helper()
		f.tellSwitch()
		select {
		case c := <-f.Contents():
			if !isNews {
				t.Errorf("%s: the switch was told", what)
			}
			return c
		default:
			if isNews {
				t.Fatalf("%s: the switch was not told", what)
			}
			return nil
		}
	}
	first := told("a start", true)
	if names := servicesOf(first); !slices.Equal(names, []string{"web", "web4"}) {
		t.Errorf("the switch gets %v", names)
	}
	told("no change", false)
	name := f.service("web").Servers[0].Name
	f.via[name] = "narrow"
	f.route()
	for _, s := range told("another interface", true).Servers {
		if isThere := s.Slot != uint16(f.slot("web", name)) && s.Slot != uint16(f.slot("web4", name)); isThere != (s.Hop.Port == 1) {
			t.Errorf("slot %d: port %d of the switch, and %s is behind another interface", s.Slot, s.Hop.Port, name)
		}
	}
	drained := byCRC(stateless(desired.PlacementHunt, 2))
	drained.Services[0].BucketHash, drained.Services[0].Buckets = desired.BucketHashMultilinear, 251
	drained.Node.Switch = crc.Node.Switch
	drained.Services[1].Servers[0].Drained = true
	f.mustApply(drained)
	c := told("a drain", true)
	if c.Services[0].Digest != first.Services[0].Digest || c.Services[0].Rows != first.Services[0].Rows {
		t.Error("a drain has changed the rows")
	}
	slot := uint16(f.slot("web", name))
	if before, now := first.Services[0].Servers[slot], c.Services[0].Servers[slot]; !before.Takes || now.Takes {
		t.Errorf("server %s took new flows: %t, and takes them: %t", name, before.Takes, now.Takes)
	}
}

// A service that has just become stateless has flows that only the flow table knows. The switch gets
// the service when they have ended.
func TestSwitchWaitsForFormerFlows(t *testing.T) {
	t.Parallel()
	before := hunting(desired.SelectConsistent, 2)
	before.Node.Switch = &desired.Switch{NetworkPort: 1, HostPort: 2}
	f := open(t, before)
	f.own = []nexthop.Link{{Index: f.ifindex["out"], MAC: ownMAC}}
	answer := f.signal(web, "web", f.row(web, "web")[1], srv6.CreateStickiness, packet.Flags(packet.ACK), packet.Sequence(1, acknowledged))
	f.run(answer)
	after := byCRC(stateless(desired.PlacementHunt, 2))
	after.Node.Switch = before.Node.Switch
	f.mustApply(after)
	f.tellSwitch()
	if names := servicesOf(<-f.Contents()); slices.Contains(names, "web") {
		t.Errorf("the switch gets %v", names)
	}
	f.services.endFormerFlows(nil, time.Now().Add(time.Hour))
	f.tellSwitch()
	if names := servicesOf(<-f.Contents()); !slices.Contains(names, "web") {
		t.Errorf("the switch gets %v, without web", names)
	}
}

// servicesOf lists the names of a content's services.
func servicesOf(c *p4switch.Content) (names []string) {
	for _, s := range c.Services {
		names = append(names, s.Name)
	}
	return names
}
