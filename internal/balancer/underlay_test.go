// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"fmt"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

const underlayPort = 6080

// underlaidServer returns a server with the IPv4 address 10.77.0.<number> in its locator.
func underlaidServer(name string, number uint8) desired.Server {
	one := uint32(1)
	locator := netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x6c, 10, 77, 0, number})
	return desired.Server{Name: name, Locator: netip.PrefixFrom(locator, 64), Weight: &one}
}

// underlaid returns the configuration of a balancer on a fabric without IPv6.
func underlaid(services ...desired.Service) *desired.Balancer {
	cfg := balancerOf(services...)
	cfg.Node.Locator = underlaidServer("", 11).Locator
	cfg.Node.Underlay = &desired.Underlay{
		Port: underlayPort, Sources: []netip.Prefix{netip.MustParsePrefix("10.77.0.96/27"), netip.MustParsePrefix("10.77.1.0/24")},
	}
	return cfg
}

// threeUnderlaid returns three servers of the underlay.
func threeUnderlaid() []desired.Server {
	return []desired.Server{underlaidServer("s1", 101), underlaidServer("s2", 102), underlaidServer("s3", 103)}
}

// under puts a frame into the underlay, as from the host in one locator to that in another.
func under(t testing.TB, frame []byte, from, to netip.Prefix, sourcePort uint16) []byte {
	t.Helper()
	out, err := packet.Underlay{
		Source: desired.UnderlayAddress(from.Addr()), Destination: desired.UnderlayAddress(to.Addr()),
		SourcePort: sourcePort, Port: underlayPort,
	}.Wrap(frame)
	testhost.Must(t, err)
	return out
}

// inUnderlay returns the outcome with its frame in the underlay, as for a packet of the flow to the
// server.
func (f *fixture) inUnderlay(o outcome, flow dataplane.Flow, server *desired.Server) outcome {
	f.t.Helper()
	port := uint16(0xc000 | murmur(f.label(flow))>>18)
	o.Frame = under(f.t, o.Frame, f.cfg.Node.Locator, server.Locator, port)
	return o
}

// underlayFlows returns flows of the first service to its VIP.
func underlayFlows(svc *desired.Service, n int) (flows []dataplane.Flow) {
	for port := range n {
		flow := flowTo(svc.VIP, 80, desired.TCP)
		flow.Source = netip.AddrPortFrom(flow.Source.Addr(), uint16(1024+port))
		flows = append(flows, flow)
	}
	return flows
}

// Packets go to the server's IPv4 address inside of UDP. Those of 1,000 flows have at least 900
// source ports, and these spread over 16 receive queues.
func TestUnderlayFrames(t *testing.T) {
	t.Parallel()
	for _, vip := range []netip.Addr{vip4, vip6} {
		cfg := underlaid(serviceOf("web", vip, 80, desired.TCP, desired.SRv6Encap, threeUnderlaid()[0]))
		cfg.Node.Limits.Flows = 65536
		f := open(t, cfg)
		svc := f.service("web")
		ports, queues := map[uint16]bool{}, map[uint32]int{}
		for i, flow := range underlayFlows(svc, 10000) {
			port := uint16(0xc000 | murmur(f.label(flow))>>18)
			if queues[toeplitz(port)%16]++; i < 1000 {
				ports[port] = true
			}
			if i >= 50 {
				continue
			}
			options := []packet.Option{packet.TrafficClass(uint8(i)), packet.HopLimit(uint8(2 + i%200))}
			for _, reason := range []string{"forward_new", "forward_known"} {
				frame := frameOf(flow, options...)
				want := f.inUnderlay(f.forwarded(frame, flow, "web", "s1", reason), flow, &svc.Servers[0])
				got := f.run(frame)
				f.check(want, got)
				testhost.Must(t, packet.Verify(got.Frame))
			}
		}
		if len(ports) < 900 {
			t.Errorf("1000 flows have %d source ports, want 900", len(ports))
		}
		for queue, flows := range queues {
			if flows < 500 || flows > 750 {
				t.Errorf("queue %d gets %d of 10000 flows, want 625 within 20%%", queue, flows)
			}
		}
	}
}

// toeplitz is the hash of receive-side scaling with the key of Microsoft's specification, for a
// packet from 10.77.0.11 and this port to 10.77.0.101, port 6080.
func toeplitz(port uint16) (hash uint32) {
	key := []byte{
		0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
	}
	input := []byte{10, 77, 0, 11, 10, 77, 0, 101, byte(port >> 8), byte(port), underlayPort >> 8, underlayPort & 0xff}
	bit := func(i int) uint32 { return uint32(key[i/8]>>(7-i%8)) & 1 }
	window := uint32(0)
	for i := range 32 {
		window = window<<1 | bit(i)
	}
	for i := range len(input) * 8 {
		if input[i/8]>>(7-i%8)&1 == 1 {
			hash ^= window
		}
		window = window<<1 | bit((i+32)%(len(key)*8))
	}
	return hash
}

// An offer has a list of candidates. The first one is the outer destination.
func TestUnderlayOffers(t *testing.T) {
	t.Parallel()
	f := open(t, underlaid(huntingOf(
		serviceOf("hunt", vip4, 80, desired.TCP, desired.SRv6Encap, threeUnderlaid()...), desired.SelectConsistent, 3)))
	svc := f.service("hunt")
	r := newReference(f)
	for _, flow := range underlayFlows(svc, 50) {
		frame := frameOf(flow)
		first := serverOfName(svc, f.row(flow, "hunt")[0])
		f.check(f.inUnderlay(r.receive(frame), flow, first), f.run(frame))
	}
}

// A packet that does not fit with the underlay is answered with the MTU without its 28 bytes.
func TestUnderlayTooBig(t *testing.T) {
	t.Parallel()
	f := open(t, underlaid(serviceOf("web", vip4, 80, desired.TCP, desired.SRv6Encap, threeUnderlaid()[0])))
	f.via["s1"] = "narrow"
	f.route()
	flow := flowTo(vip4, 80, desired.TCP)
	fits := frameOf(flow, packet.Payload(make([]byte, 1500-68-40)))
	f.check(f.inUnderlay(f.forwarded(fits, flow, "web", "s1", "forward_new"), flow, serverOfName(f.service("web"), "s1")), f.run(fits))
	larger := frameOf(flow, packet.Payload(make([]byte, 1500-68-40+1)))
	p, _ := parse(larger)
	f.check(tell(larger, p, "drop_too_big", 1500-68), f.run(larger))
}

// A server's signal comes out of the underlay, and so does its answer to a probe. Packets of
// strangers, malformed ones, and those without the underlay are dropped.
func TestUnderlayToBalancer(t *testing.T) {
	t.Parallel()
	f := open(t, underlaid(huntingOf(
		serviceOf("hunt", vip4, 80, desired.TCP, desired.SRv6Encap, threeUnderlaid()...), desired.SelectConsistent, 3)))
	flow := flowTo(vip4, 80, desired.TCP)
	svc, own := f.service("hunt"), f.cfg.Node.Locator
	server := serverOfName(svc, f.row(flow, "hunt")[0])
	signal, err := packet.Signal(reply(flow), packet.Encap{
		Kind: desired.SRv6Encap, Sender: server.Locator.Addr(),
		Segments: []netip.Addr{srv6.SID{Locator: own, Function: srv6.CreateStickiness}.Addr()},
		Own:      packet.MAC{2, 0, 0, 0, 0, 1}, NextHop: ownMAC,
	})
	f.must(err)
	frame := under(t, signal, server.Locator, own, 50000)
	refuse := func(name, reason string, frame []byte, length uint64) {
		t.Helper()
		got := f.run(frame)
		if got.Verdict != verdictDrop || fmt.Sprint(got.Reasons) != fmt.Sprint(map[string]tally{reason: {1, length, 0}}) {
			t.Errorf("%s: verdict %d, %v, want %s", name, got.Verdict, got.Reasons, reason)
		}
	}
	set := func(offset int, value byte) []byte { return packet.SetByte(frame, ethernetLength+offset, value) }
	refuse("a stranger", "drop_stranger", set(15, 96+32), layer3(frame))
	refuse("without the underlay", "drop_outside", signal, layer3(signal))
	refuse("with a checksum", "drop_underlay", set(27, 1), layer3(frame))
	refuse("to another locator", "drop_underlay", set(28+24+7, 9), layer3(frame))
	refuse("a client's packet", "drop_underlay",
		under(t, frameOf(flowTo(vip6, 80, desired.TCP)), server.Locator, own, 50000), layer3(frameOf(flowTo(vip6, 80, desired.TCP)))+28)
	other := under(t, signal, server.Locator, server.Locator, 50000)
	if got := f.run(other); reasonOf(got) != "pass_not_vip" || !bytes.Equal(got.Frame, other) {
		t.Errorf("to another host: %v", got.Reasons)
	}
	token := uint64(0x123456789abc0000) | uint64(f.slot("hunt", server.Name))
	f.setProbe(token)
	answer := packet.ProbeAnswer(server.Locator.Addr(), own.Addr(), token, 1, 1)
	refuse("the answer to a probe", "take_probe", under(t, answer, server.Locator, own, 50000), layer3(answer))
	want := f.returned(signal, "return_create")
	f.check(want, f.run(frame))
	known := frameOf(flow, packet.Flags(packet.ACK))
	f.check(f.inUnderlay(f.forwarded(known, flow, "hunt", server.Name, "forward_new"), flow, server), f.run(known))
}

// Health checks and copies of ICMP errors leave tc in the underlay.
func TestUnderlayChecks(t *testing.T) {
	t.Parallel()
	f := open(t, underlaid(serviceOf("web", vip4, 80, desired.TCP, desired.SRv6Encap, threeUnderlaid()...)))
	f.checked()
	svc := f.service("web")
	server := serverOfName(svc, "s2")
	_, got, _ := f.sendCheck(checkFrame(svc, 64), dataplane.MarkOf(f.slot("web", "s2")))
	label := uint32(got[ethernetLength+28+1]&0xf)<<16 | uint32(got[ethernetLength+28+2])<<8 | uint32(got[ethernetLength+28+3])
	want := f.encapsulatedCheck(svc, server, label, []srv6.SID{{Locator: server.Locator, Function: srv6.Deliver}})
	port := uint16(got[ethernetLength+20])<<8 | uint16(got[ethernetLength+21])
	if want = under(t, want, f.cfg.Node.Locator, server.Locator, port); port < 0xc000 || !bytes.Equal(got, want) {
		t.Errorf("got  %x\nwant %x", got, want)
	}
	testhost.Must(t, packet.Verify(got))
}

// Trace shows the outer addresses and ports, and counts the bytes of the underlay.
func TestUnderlayTrace(t *testing.T) {
	t.Parallel()
	f := open(t, underlaid(serviceOf("web", vip4, 80, desired.TCP, desired.SRv6Encap, threeUnderlaid()[0])))
	f.via["s1"] = "narrow"
	f.route()
	f.must(f.plane.Objects.XdpLb.Pin(filepath.Join(datapath.Dir(f.cfg.Node.Instance), datapath.BalancerProgram)))
	view, err := inspect.OpenView(f.cfg.Node.Instance)
	f.must(err)
	defer view.Close()
	flow := flowTo(vip4, 80, desired.TCP)
	got, err := view.Trace(inspect.Packet{Flow: flow, Opens: true, Length: 40})
	f.must(err)
	port := uint16(0xc000 | murmur(f.label(flow))>>18)
	want := &inspect.TracedUnderlay{
		Source:      netip.AddrPortFrom(netip.MustParseAddr("10.77.0.11"), port),
		Destination: netip.MustParseAddrPort("10.77.0.101:6080"),
	}
	if e := got.Encapsulation; e == nil || e.Underlay == nil || *e.Underlay != *want || e.Added != 68 || e.MaxLength != 1432 {
		t.Errorf("got %+v, want %+v", e, want)
	}
}
