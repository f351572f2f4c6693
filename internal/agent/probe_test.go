// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/testhost"
)

// probeFor returns a probe about a VIP.
func probeFor(kind desired.Encapsulation, vip netip.Addr, options ...packet.Option) []byte {
	return wrap(packet.Probe(sender, vip, 0x0123456789abcdef, options...), srv6Encap(kind, sidOf(sid, probe)))
}

// aboutService returns a probe about a TCP service.
func aboutService(kind desired.Encapsulation, service netip.AddrPort) []byte {
	return wrap(packet.ServiceProbe(sender, service, protocolTCP, 0x0123456789abcdef), srv6Encap(kind, sidOf(sid, probe)))
}

// probes returns probes in all encapsulations, and packets that resemble probes.
func probes() []packetCase {
	insert, encap4 := probeFor(desired.SRv6Insert, vip6.Addr()), probeFor(desired.SRv6Encap, vip4.Addr())
	encap6 := probeFor(desired.SRv6Encap, vip6.Addr())
	reference := newReference(testConfig())
	cases := []packetCase{
		{"insert", insert, "answer_probe", nil},
		{"encap, IPv4", encap4, "answer_probe", nil},
		{"encap, IPv6", encap6, "answer_probe", nil},
		{"insert, about a service", aboutService(desired.SRv6Insert, vip6), "answer_probe", nil},
		{"encap, about a service, IPv4", aboutService(desired.SRv6Encap, vip4), "answer_probe", nil},
		{"encap, about a service, IPv6", aboutService(desired.SRv6Encap, vip6), "answer_probe", nil},
		{"encap, about a part of a service", cut(aboutService(desired.SRv6Encap, vip6), len(encap6)-14+7), "answer_probe", nil},
		{"insert, another server's VIP", probeFor(desired.SRv6Insert, other6.Addr()), "answer_probe", nil},
		{"encap, another server's VIP", probeFor(desired.SRv6Encap, other4.Addr()), "answer_probe", nil},
		{"Ethernet padding", packet.Pad(encap4, 1, 2, 3), "answer_probe", nil},
		{"hop limit 1", packet.SetHopLimit(insert, 1), "answer_probe", nil},
		{"other argument", set(encap6, functionAt+2, 1, 2, 3, 4, 5, 6), "answer_probe", nil},
		{"insert, behind options", probeFor(desired.SRv6Insert, vip6.Addr(), packet.HopByHop(8)), "answer_probe", nil},
		{"insert, from a stranger", wrap(packet.Probe(sender, vip6.Addr(), 1), packet.Encap{
			Kind: desired.SRv6Insert, Sender: stranger, Segments: []netip.Addr{sidOf(sid, probe)}}), "drop_sender", nil},
		{"encap, from a stranger", wrap(packet.Probe(sender, vip6.Addr(), 1), packet.Encap{
			Kind: desired.SRv6Encap, Sender: stranger, Segments: []netip.Addr{sidOf(sid, probe)}}), "drop_sender", nil},
		{"a SYN", asks(desired.SRv6Insert, probe, packet.TCP(client6, vip6)), "drop_probe", nil},
		{"a SYN, encapsulated", asks(desired.SRv6Encap, probe, packet.TCP(client4, vip4)), "drop_probe", nil},
		{"insert, no token", cut(insert, len(insert)-14-1), "drop_probe", nil},
		{"encap, no token", cut(encap4, len(encap4)-14-1), "drop_probe", nil},
		{"a token of padding", packet.Pad(cut(encap6, len(encap6)-14-1), 7), "drop_probe", nil},
		{"more headers than a probe has", probeFor(desired.SRv6Insert, vip6.Addr(), packet.HopByHop(256)), "drop_probe", nil},
	}
	for i := range cases {
		if cases[i].reason == "answer_probe" {
			_, cases[i].out = reference.receive(cases[i].frame)
		}
	}
	return cases
}

var stranger = netip.MustParseAddr("fd00:bad:0:1::")

// A VIP that is not on the host is not served, whatever the configuration says.
func TestProbeAboutAbsentVIP(t *testing.T) {
	c := openComparison(t)
	c.absent = []netip.Addr{vip6.Addr()}
	testhost.Must(t, c.objects.Vips.Put(vip6.Addr().As16(), uint32(0)))
	for _, vip := range []netip.Addr{vip4.Addr(), vip6.Addr()} {
		frame := probeFor(desired.SRv6Encap, vip)
		reason, want := c.receive(frame)
		c.check(t, frame, reason, want)
		flags := want[len(want)-5]
		if isServed := flags == answersServed; isServed != (vip == vip4.Addr()) {
			t.Errorf("%v: flags %d", vip, flags)
		}
	}
}

// The tc program sends back only the answers that the XDP program made.
func TestSendBackProbeAnswersOnly(t *testing.T) {
	k := testKernel(t)
	answer := packet.ProbeAnswer(testConfig().Node.Locator.Addr(), sender, 1, 1, 1, packet.Ethernet(packet.MAC{2}, hostMAC))
	want := packet.SetMACs(answer, hostMAC, packet.MAC{2})
	if verdict, out := run(t, k.objects.TcForward, answer); verdict != tcRedirect || !slices.Equal(out, want) {
		t.Errorf("verdict %d; (-want +got):\n%s", verdict, cmp.Diff(want, out))
	}
	for name, frame := range map[string][]byte{
		"from another host":   packet.FlipByte(answer, 14+8+7),
		"from a SID":          packet.SetByte(answer, 14+8+9, probe),
		"to another function": packet.SetByte(answer, 14+24+9, deliverAlways),
		"another protocol":    packet.SetByte(answer, 14+6, 17),
		"to another MAC":      packet.FlipByte(answer, 3),
	} {
		t.Run(name, func(t *testing.T) {
			if verdict, out := run(t, k.objects.TcForward, frame); verdict != tcUnspec || !slices.Equal(out, frame) {
				t.Errorf("verdict %#x, want %#x", verdict, uint32(tcUnspec))
			}
		})
	}
}

// answered returns the probes that are answered, or the others.
func answered(are bool) []packetCase {
	return slices.DeleteFunc(probes(), func(c packetCase) bool { return (c.reason == "answer_probe") != are })
}
