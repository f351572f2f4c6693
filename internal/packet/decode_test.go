// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestDescriptions(t *testing.T) {
	syn6, syn4 := packet.TCP(client6, vip6), packet.TCP(client4, vip4)
	answer := packet.TCP(vip6, client6, packet.Flags(packet.SYN|packet.ACK))
	big := packet.UDP(client6, vip6, packet.Payload(make([]byte, 100)))
	for _, c := range []struct {
		frame []byte
		want  string
	}{
		{syn6, "2001:db8:c::2.40000 > 2001:db8:80::1.80 tcp [S]"},
		{answer, "2001:db8:80::1.80 > 2001:db8:c::2.40000 tcp [S.]"},
		{packet.UDP(client4, vip4, packet.VLAN(5)), "192.0.2.2.40000 > 198.51.100.1.80 udp"},
		{packet.ICMPError(client6.Addr(), 2, 0, 1280, answer),
			"2001:db8:c::2 > 2001:db8:80::1 icmp6 PacketTooBig"},
		{packet.Fragments(big, 64, 1)[1], "2001:db8:c::2 > 2001:db8:80::1 udp fragment at 64"},
		{encapsulated(t, syn6, srv6Encap(desired.SRv6Insert, deliver1)),
			"2001:db8:c::2.40000 > 2001:db8:80::1.80 tcp [S] " +
				"srh(sl=1: fd00:6c:0:1:: → fd00:5:0:1::dv* → 2001:db8:80::1)"},
		{encapsulated(t, syn4, srv6Encap(desired.SRv6Encap, deliver1)),
			"192.0.2.2.40000 > 198.51.100.1.80 tcp [S] in ip6(fd00:6c:0:1:: > fd00:5:0:1::dv)"},
		{encapsulated(t, syn4, srv6Encap(desired.SRv6Encap, deliver1, deliver2)),
			"192.0.2.2.40000 > 198.51.100.1.80 tcp [S] in ip6(fd00:6c:0:1:: > fd00:5:0:1::dv) " +
				"srh(sl=1: fd00:5:0:2::dv)"},
		{encapsulated(t, syn6, tunnel(desired.GRE, outer4)),
			"2001:db8:c::2.40000 > 2001:db8:80::1.80 tcp [S] in gre(10.0.0.1 > 10.0.0.2)"},
		{encapsulated(t, syn6, tunnel(desired.IPIP, outer4)),
			"2001:db8:c::2.40000 > 2001:db8:80::1.80 tcp [S] in ip4(10.0.0.1 > 10.0.0.2)"},
	} {
		p, err := packet.Decode(c.frame)
		if err != nil {
			t.Errorf("%s: %v", c.want, err)
		}
		if got := p.String(); got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	}
}

// The option Routing makes a packet that travels to its second segment. The checksum is that for
// the final destination.
func TestRoutingBuilder(t *testing.T) {
	srh := packet.NewSRH(1, balancer, deliver1, vip6.Addr())
	frame := packet.TCP(client6, vip6, packet.HopByHop(8), packet.Routing(srh))
	d := packettest.Dissect(t, [][]byte{frame})[0]
	if len(d.Problems) > 0 {
		t.Errorf("tshark: %v", d.Problems)
	}
	if err := packet.Verify(frame); err != nil {
		t.Error(err)
	}
	p, err := packet.Decode(frame)
	testhost.Must(t, err)
	if h := p.Headers[0]; h.Destination != deliver1 || h.FinalDestination() != vip6.Addr() {
		t.Errorf("destinations %v and %v", h.Destination, h.FinalDestination())
	}
}

func TestExtensionHeadersOfAllSizes(t *testing.T) {
	for size := 8; size <= 2048; size += 8 {
		frame := packet.TCP(client6, vip6, packet.HopByHop(size), packet.DestinationOptions(size))
		if got, want := packet.TransportOffset(frame), 14+40+2*size; got != want {
			t.Errorf("two headers of %d bytes: TCP at %d, want %d", size, got, want)
		}
		if p, err := packet.Decode(frame); err != nil || p.DestinationPort != vip6.Port() {
			t.Errorf("two headers of %d bytes: %v, %v", size, p, err)
		}
	}
}

func TestFragmentsReassemble(t *testing.T) {
	data := make([]byte, 500)
	for _, client := range [][]byte{
		packet.UDP(client4, vip4, packet.Payload(data), packet.IPOptions([]byte{0x94, 4, 0, 0})),
		packet.UDP(client6, vip6, packet.Payload(data), packet.HopByHop(8)),
	} {
		fragments := packet.Fragments(client, 128, 77)
		if len(fragments) != 4 {
			t.Fatalf("%d fragments of 508 bytes, want 4", len(fragments))
		}
		d := packettest.Dissect(t, fragments, "udp.length")
		for i := range d {
			if len(d[i].Problems) > 0 {
				t.Errorf("fragment %d (%s): %v", i, d[i].Protocols, d[i].Problems)
			}
		}
		if got := d[3].Fields["udp.length"]; len(got) != 1 || got[0] != "508" {
			t.Errorf("tshark reassembles a datagram of %v bytes, want 508", got)
		}
	}
	atomic := packet.Fragments(packet.UDP(client6, vip6), 128, 77)
	if len(atomic) != 1 || packet.TransportOffset(atomic[0]) != 14+40+8 {
		t.Errorf("an IPv6 packet that fits became %x", atomic)
	}
}

// No bytes make the parsers panic.
func TestReadersSurviveAnything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		version := rapid.SampledFrom([]int{4, 6}).Draw(t, "version")
		client, e := packettest.Frame(version).Draw(t, "frame"), packettest.Encap(version).Draw(t, "encap")
		frame, err := packet.Encapsulate(client, e)
		if err != nil {
			t.Fatal(err)
		}
		for range rapid.IntRange(0, 4).Draw(t, "changes") {
			offset := rapid.IntRange(0, min(len(frame), 140)-1).Draw(t, "offset")
			frame = packet.SetByte(frame, offset, rapid.Byte().Draw(t, "value"))
		}
		frame = packet.Truncate(frame, rapid.IntRange(0, len(frame)).Draw(t, "length"))
		if p, _ := packet.Decode(frame); p.String() == "" {
			t.Fatal("no description")
		}
		_ = packet.Verify(frame)
		_, _ = packet.Decapsulate(frame)
		_, _ = packet.Advance(frame)
		_, _ = packet.Encapsulate(frame, packettest.Encap(version).Draw(t, "again"))
	})
}
