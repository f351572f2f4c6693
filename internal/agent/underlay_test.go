// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
	"github.com/segue-lb/segue/internal/testhost"
)

const underlayPort = 6080

// Hosts of the underlay, and their SIDs.
var (
	underlaidNode     = netip.MustParseAddr("10.77.0.101")
	underlaidOther    = netip.MustParseAddr("10.77.0.102")
	underlaidBalancer = netip.MustParseAddr("10.77.0.11")
	underlaidSID      = netip.MustParseAddr("fd00:6c:a4d:65:5::")
	underlaidNextSID  = netip.MustParseAddr("fd00:6c:a4d:66:5::")
	underlaidSender   = netip.MustParseAddr("fd00:6c:a4d:b::")
)

// underlaidConfig is the configuration of a server on a fabric without IPv6.
func underlaidConfig() *desired.Agent {
	cfg := testConfig()
	cfg.Node.Locator = netip.MustParsePrefix("fd00:6c:a4d:65::/64")
	cfg.Node.Underlay = &desired.Underlay{Port: underlayPort, Sources: []netip.Prefix{
		netip.MustParsePrefix("192.0.2.0/30"), netip.MustParsePrefix("10.77.0.0/24"),
	}}
	cfg.Services = []desired.AgentService{
		{Name: "all", VIP: vip4.Addr(), Port: desired.AllPorts, Protocol: desired.TCP, Encapsulation: desired.SRv6Encap,
			Accept: desired.Accept{Policy: desired.AcceptAlways}, NotLocal: desired.NotLocalDrop},
		{Name: "gre", VIP: vip6.Addr(), Port: 80, Protocol: desired.TCP, Encapsulation: desired.GRE},
	}
	return cfg
}

// under puts a frame into the underlay.
func under(frame []byte, from, to netip.Addr) []byte {
	out, err := packet.Underlay{Source: from, Destination: to, SourcePort: 50000, Port: underlayPort}.Wrap(frame)
	if err != nil {
		panic(err)
	}
	return out
}

// toUnderlaid returns a client's packet in srv6-encap, without the underlay.
func toUnderlaid(segments ...netip.Addr) []byte {
	e := srv6Encap(desired.SRv6Encap, segments...)
	e.Sender = underlaidSender
	return to(client4, vip4, e)
}

func withFunction(sid netip.Addr, function byte) netip.Addr {
	bytes := sid.As16()
	bytes[9] = function
	return netip.AddrFrom16(bytes)
}

func TestUnderlay(t *testing.T) {
	k := testKernelOf(t, underlaidConfig())
	plain := toUnderlaid(underlaidSID)
	whole := under(plain, underlaidBalancer, underlaidNode)
	offer := toUnderlaid(withFunction(underlaidSID, 6), withFunction(underlaidNextSID, 6))
	classed := func(class byte) []byte {
		e := srv6Encap(desired.SRv6Encap, underlaidSID)
		e.Sender = underlaidSender
		return to(client4, vip4, e, packet.TrafficClass(class))
	}
	marked := func(class byte) []byte { // by a router of the fabric
		return set(under(classed(class), underlaidBalancer, underlaidNode), 1, 3)
	}
	for _, c := range []struct {
		name, reason string
		verdict      uint32
		frame, out   []byte // out is nil: unchanged
	}{
		{"delivered", "deliver_srv6_encap", xdpPass, whole, delivered(plain)},
		{"another source", "deliver_srv6_encap", xdpPass,
			under(plain, netip.MustParseAddr("192.0.2.3"), underlaidNode), delivered(plain)},
		{"a mark of the fabric", "deliver_srv6_encap", xdpPass, marked(2), delivered(classed(3))},
		{"a mark that the client does not know", "drop_underlay", xdpDrop, marked(0), nil},
		{"passed on", "next_not_local", xdpPass, under(offer, underlaidBalancer, underlaidNode), under(advanced(offer), underlaidNode, underlaidOther)},
		{"a stranger", "drop_stranger", xdpDrop, under(plain, netip.MustParseAddr("192.0.2.4"), underlaidNode), nil},
		{"a stranger's other port", "pass_not_for_agent", xdpPass,
			set(under(plain, netip.MustParseAddr("192.0.2.4"), underlaidNode), 23, 1), nil},
		{"to another host", "pass_not_for_agent", xdpPass, under(plain, underlaidBalancer, underlaidOther), nil},
		{"to a SID of another host", "drop_underlay", xdpDrop,
			under(toUnderlaid(underlaidNextSID), underlaidBalancer, underlaidNode), nil},
		{"IPv4 inside", "drop_underlay", xdpDrop, set(whole, 28, 0x45), nil},
		{"with a checksum", "drop_underlay", xdpDrop, set(whole, 27, 1), nil},
		{"a fragment", "drop_underlay", xdpDrop, set(whole, 6, 0x20), nil},
		{"a UDP length too large", "drop_underlay", xdpDrop, set(whole, 25, whole[14+25]+1), nil},
		{"an IPv4 length too small", "drop_underlay", xdpDrop, set(whole, 3, whole[14+3]-1), nil},
		{"IPv4 options", "drop_underlay", xdpDrop, set(whole, 0, 0x46), nil},
		{"too short", "drop_underlay", xdpDrop, packet.Truncate(whole, 14+28+39), nil},
		{"without the underlay", "drop_outside", xdpDrop, plain, nil},
		{"srv6-insert", "drop_outside", xdpDrop, under(to(client6, vip6, packet.Encap{
			Kind: desired.SRv6Insert, Sender: underlaidSender, Segments: []netip.Addr{underlaidSID},
		}), underlaidBalancer, underlaidNode), nil},
		{"a tunnel beside it", "deliver_gre", xdpPass, to(client6, vip6, tunnel(desired.GRE, tunnel4)),
			delivered(to(client6, vip6, tunnel(desired.GRE, tunnel4)))},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := counters(t, k)
			verdict, out := run(t, k.objects.XdpAgent, c.frame)
			if verdict != c.verdict {
				t.Errorf("verdict %d, want %d", verdict, c.verdict)
			}
			want := map[string]agentCounter{c.reason: {Packets: 1, Bytes: uint64(len(c.frame) - 14)}}
			if diff := cmp.Diff(want, changed(before, counters(t, k))); diff != "" {
				t.Errorf("counters (-want +got):\n%s", diff)
			}
			if c.verdict == xdpDrop {
				return // the frame may have changed
			}
			if c.out == nil {
				c.out = c.frame
			}
			if diff := cmp.Diff(c.out, out); diff != "" {
				t.Errorf("frame (-want +got):\n%s", diff)
			}
		})
	}
}

// Only frames that XDP has left in the underlay leave by tc, and signals get the underlay there.
func TestUnderlayLeaves(t *testing.T) {
	k := testKernelOf(t, underlaidConfig())
	offer := toUnderlaid(withFunction(underlaidSID, 6), withFunction(underlaidNextSID, 6))
	left := under(advanced(offer), underlaidNode, underlaidOther)
	if verdict, _ := run(t, k.objects.TcForward, left); verdict != tcRedirect {
		t.Errorf("a frame to another server: verdict %d", verdict)
	}
	for name, frame := range map[string][]byte{
		"from another host's MAC": packet.SetMACs(left, packet.MAC{2}, hostMAC),
		"from another address":    set(left, 15, 9),
		"to another port":         set(left, 23, 1),
		"of another protocol":     set(left, 9, 6),
		"without the underlay":    advanced(offer),
	} {
		t.Run(name, func(t *testing.T) { requireLeftAlone(t, k, frame) })
	}
	f := flow{client4, vip4}
	setFlow(t, k, f, desired.SRv6Encap, "wait", 0)
	answer := packet.TCP(vip4, client4, packet.Flags(packet.ACK), packet.TrafficClass(0x2a))
	verdict, out := transmit(t, k, answer, 0)
	if verdict != tcRedirect || len(out) != len(answer)+68 {
		t.Fatalf("a signal: verdict %d, %d bytes more", verdict, len(out)-len(answer))
	}
	balancer := balancer1.As16()
	want, err := packet.Signal(answer, packet.Encap{
		Kind: desired.SRv6Encap, Sender: underlaidConfig().Node.Locator.Addr(),
		Segments:  []netip.Addr{srv6.SID{Locator: netip.PrefixFrom(balancer1, 64), Function: srv6.CreateStickiness}.Addr()},
		FlowLabel: binary.BigEndian.Uint32(out[14+28:]) & 0xfffff, Own: packet.MAC(answer[6:12]), NextHop: packet.MAC(answer),
	})
	testhost.Must(t, err)
	want, err = packet.Underlay{
		Source: underlaidNode, Destination: netip.AddrFrom4([4]byte(balancer[4:8])),
		SourcePort: binary.BigEndian.Uint16(out[14+20:]), Port: underlayPort,
	}.Wrap(want)
	testhost.Must(t, err)
	if diff := cmp.Diff(want, out); diff != "" {
		t.Errorf("a signal (-want +got):\n%s", diff)
	}
}
