// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// probeToken is the token of a probe to the server in slot 0.
const probeToken = 0xabcdef0123450000

// answerTo returns the answer of an agent that has the VIP.
func (f *fixture) answerTo(token uint64) []byte {
	return packet.ProbeAnswer(netip.MustParseAddr("fd00:5:0:1::"), f.cfg.Node.Locator.Addr(), token, 1, 1)
}

// setProbe prepares a probe about the first service's VIP.
func (f *fixture) setProbe(token uint64) {
	svc := f.cfg.Services[0]
	f.plane.Probes.Set(probe.Request{Token: token, Target: &probe.Target{
		Slot: uint32(token & 0xffff), VIP: svc.VIP, Protocol: svc.Protocol, Port: svc.Port.Number(),
		Encapsulation: svc.Encapsulation,
	}})
}

// probeOf returns the frame of a probe to a server's agent, as the reference implementation makes
// it.
func (f *fixture) probeOf(svc *desired.Service, server string, token uint64) []byte {
	f.t.Helper()
	label := uint32(token>>16) & 0xfffff
	sender := f.cfg.Node.Locator.Addr()
	protocol := map[desired.Protocol]uint8{desired.TCP: 6, desired.UDP: 17}[svc.Protocol]
	frame := packet.ServiceProbe(sender, netip.AddrPortFrom(svc.VIP, svc.Port.Number()), protocol, token,
		packet.FlowLabel(label))
	s := serverOfName(svc, server)
	out, err := packet.Encapsulate(frame, packet.Encap{
		Kind: svc.Encapsulation, FlowLabel: label, Sender: sender,
		Segments: []netip.Addr{srv6.SID{Locator: s.Locator, Function: srv6.Probe}.Addr()},
		Own:      f.macs[f.linkOf(server)], NextHop: hopMAC(target(s)),
	})
	f.must(err)
	return out
}

// A probe takes the path of clients' packets: the encapsulation of the service, and the next hop of
// the server.
func TestProbeFrames(t *testing.T) {
	t.Parallel()
	var services []desired.Service
	for i, w := range ways {
		if w.kind == desired.SRv6Insert || w.kind == desired.SRv6Encap {
			services = append(services, w.serviceBy(uint8(i), []desired.Protocol{desired.TCP, desired.UDP}[i%2]))
		}
	}
	f := open(t, balancerOf(services...))
	for i := range services {
		svc := &services[i]
		t.Run(svc.Name, func(t *testing.T) {
			f.t = t
			slot := f.slot(svc.Name, "s")
			token := 0x123456789abc0000 | uint64(slot)
			f.plane.Probes.Set(probe.Request{Token: token, Target: &probe.Target{
				Slot: slot, VIP: svc.VIP, Protocol: svc.Protocol, Port: svc.Port.Number(),
				Encapsulation: svc.Encapsulation,
			}})
			before := f.counters()
			got, err := f.plane.Probes.Frame(slot)
			f.must(err)
			if want := f.probeOf(svc, "s", token); !bytes.Equal(got, want) {
				t.Errorf("got  %x\nwant %x", got, want)
			}
			if after := f.counters(); len(difference(before.servers, after.servers)) > 0 {
				t.Error("a probe is counted as a packet of the server's")
			}
		})
	}
}

// A server is not probed if it has no next hop, or if the frame is longer than the MTU.
func TestNoProbeWithoutWay(t *testing.T) {
	t.Parallel()
	f := open(t, balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Insert, srv6Server("s1", 1, 1))))
	slot := f.slot("web", "s1")
	f.setProbe(1<<16 | uint64(slot))
	if frame, err := f.plane.Probes.Frame(slot); frame == nil || err != nil {
		t.Fatalf("a server with a next hop: %x, %v", frame, err)
	}
	f.via["s1"] = ""
	f.route()
	if frame, err := f.plane.Probes.Frame(slot); frame != nil || err != nil {
		t.Errorf("a server without a next hop: %x, %v", frame, err)
	}
}

// Only an answer with the token of the last probe is accepted.
func TestProbeAnswers(t *testing.T) {
	t.Parallel()
	f := open(t, balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Insert,
		srv6Server("s1", 1, 1), srv6Server("s2", 2, 1))))
	slot, other := f.slot("web", "s1"), f.slot("web", "s2")
	token := 0x123456789abc0000 | uint64(slot)
	f.setProbe(token)
	answer := f.answerTo(token)
	short := packet.Truncate(packet.SetByte(answer, ethernetLength+5, 15), len(answer)-1)
	for _, c := range []struct {
		name   string
		frame  []byte
		reason string
	}{
		{"none yet", nil, ""},
		{"to another probe", f.answerTo(token + 1<<16), "drop_sender"},
		{"for another server", f.answerTo(token&^0xffff | uint64(other)), "drop_sender"},
		{"for a server that there is not", f.answerTo(token | 0xffff), "drop_sender"},
		{"to no probe", f.answerTo(uint64(other)), "drop_sender"},
		{"to the token 0", f.answerTo(0), "drop_sender"},
		{"too short", short, "drop_signal"},
		{"of another protocol", packet.SetByte(answer, ethernetLength+6, 50), "drop_signal"},
		{"to another balancer", packet.FlipByte(answer, ethernetLength+24+7), "pass_not_vip"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f.t = t
			if c.frame != nil {
				f.check(refused(c.frame, c.reason, layer3(c.frame)), f.run(c.frame))
			}
			if _, ok := f.plane.Probes.Answer(slot); ok {
				t.Error("the server has answered")
			}
		})
	}
	f.t = t
	f.check(refused(answer, "take_probe", layer3(answer)), f.run(answer))
	if got, ok := f.plane.Probes.Answer(slot); !ok || got != (probe.Answer{Version: 1, Serves: true}) {
		t.Errorf("got %+v, %v", got, ok)
	}
	refusal := packet.ProbeAnswer(netip.MustParseAddr("fd00:5:0:1::"), f.cfg.Node.Locator.Addr(), token, 0x102, 0xfffc)
	f.check(refused(refusal, "take_probe", layer3(refusal)), f.run(refusal))
	if got, ok := f.plane.Probes.Answer(slot); !ok || got != (probe.Answer{Version: 0x102}) {
		t.Errorf("got %+v, %v", got, ok)
	}
	refusing := packet.ProbeAnswer(netip.MustParseAddr("fd00:5:0:1::"), f.cfg.Node.Locator.Addr(), token, 1, 3)
	f.check(refused(refusing, "take_probe", layer3(refusing)), f.run(refusing))
	if got, ok := f.plane.Probes.Answer(slot); !ok || got != (probe.Answer{Version: 1, Serves: true, Refuses: true}) {
		t.Errorf("got %+v, %v", got, ok)
	}
	f.setProbe(token + 1<<16)
	if _, ok := f.plane.Probes.Answer(slot); ok {
		t.Error("the server has answered the next probe")
	}
	f.plane.Probes.Forget(slot)
	f.check(refused(answer, "drop_sender", layer3(answer)), f.run(answer))
}

// A balancer at the edge of the domain accepts no answers from outside.
func TestProbeAnswersFromOutside(t *testing.T) {
	t.Parallel()
	f := open(t, outsideOf(balancerOf(serviceOf("web", vip6, 80, desired.TCP, desired.SRv6Encap, srv6Server("s1", 1, 1)))))
	slot := f.slot("web", "s1")
	token := 1<<16 | uint64(slot)
	f.setProbe(token)
	answer := f.answerTo(token)
	f.check(refused(answer, "drop_outside", layer3(answer)), f.run(answer))
}
