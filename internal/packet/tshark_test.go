// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/packet/packettest"
	"github.com/segue-lb/segue/internal/testhost"
)

// clientPackets returns packets of an IP version. The key says what is special about a packet.
func clientPackets(version int) map[string][]byte {
	src, dst, echo, unreachable := client6, vip6, uint8(128), uint8(1)
	extra := []packet.Option{packet.HopByHop(8), packet.DestinationOptions(8)}
	if version == 4 {
		src, dst, echo, unreachable = client4, vip4, 8, 3
		extra = []packet.Option{packet.IPOptions([]byte{0x94, 4, 0, 0})} // router alert
	}
	data := packet.Payload([]byte("hello"))
	answer := packet.TCP(dst, src, packet.Flags(packet.ACK), data)
	router := src.Addr().Next()
	return map[string][]byte{
		"SYN":        packet.TCP(src, dst, packet.MSS(1460), packet.Timestamps(1, 0)),
		"data":       packet.TCP(src, dst, packet.Flags(packet.PSH|packet.ACK), data, packet.TrafficClass(0xb9)),
		"extensions": packet.TCP(src, dst, append(extra, data)...),
		"UDP":        packet.UDP(src, dst, data),
		"VLAN":       packet.UDP(src, dst, data, packet.VLAN(7)),
		"echo":       packet.ICMP(src.Addr(), dst.Addr(), echo, 0, 1, data),
		"error":      packet.ICMPError(router, unreachable, 0, 0, answer),
	}
}

func TestTsharkAgreesWithClientPackets(t *testing.T) {
	for _, version := range []int{4, 6} {
		var names []string
		var frames [][]byte
		for name, frame := range clientPackets(version) {
			names, frames = append(names, name), append(frames, frame)
		}
		for i, d := range packettest.Dissect(t, frames) {
			if len(d.Problems) > 0 {
				t.Errorf("IPv%d %s (%s): %v", version, names[i], d.Protocols, d.Problems)
			}
		}
	}
}

// A client may use any port, including ports that a protocol has registered.
func TestTsharkTakesNoPortForAProtocol(t *testing.T) {
	var frames [][]byte
	data := packet.Payload(bytes.Repeat([]byte("no protocol of any port "), 50))
	// Ports of VXLAN, HTTP, PROFINET and HCrt, and one without a protocol.
	for _, port := range []uint16{4789, 8080, 34964, 47000, 53000} {
		source := netip.AddrPortFrom(netip.MustParseAddr("2001:db8:c::2"), port)
		target := netip.MustParseAddrPort("[2001:db8:80::1]:60001")
		frames = append(frames, packet.UDP(source, target, data), packet.TCP(source, target, packet.Flags(packet.ACK), data))
	}
	for _, d := range packettest.Dissect(t, frames) {
		if len(d.Problems) > 0 {
			t.Errorf("%s: %v", d.Protocols, d.Problems)
		}
	}
}

func TestTsharkAgreesWithEncapsulations(t *testing.T) {
	type sample struct {
		name     string
		overhead int
		client   []byte
	}
	var samples []sample
	var frames [][]byte
	for _, e := range encapsulations {
		for _, version := range e.inner {
			for name, client := range clientPackets(version) {
				frame, err := packet.Encapsulate(client, e.encap)
				if err != nil {
					t.Fatalf("%s, IPv%d %s: %v", e.name, version, name, err)
				}
				samples = append(samples, sample{fmt.Sprintf("%s, IPv%d %s", e.name, version, name), e.overhead, client})
				frames = append(frames, frame)
			}
		}
	}
	for i, d := range packettest.Dissect(t, frames, "frame.len") {
		if len(d.Problems) > 0 {
			t.Errorf("%s (%s): %v", samples[i].name, d.Protocols, d.Problems)
		}
		if got, want := d.Fields["frame.len"][0], fmt.Sprint(len(samples[i].client)+samples[i].overhead); got != want {
			t.Errorf("%s: %s bytes, want %s", samples[i].name, got, want)
		}
	}
}

func TestTsharkReadsSegments(t *testing.T) {
	for _, e := range encapsulations {
		if !strings.HasPrefix(e.name, "srv6") || !strings.HasSuffix(e.name, "new flow") {
			continue
		}
		frame, err := packet.Encapsulate(packet.TCP(client6, vip6), e.encap)
		testhost.Must(t, err)
		decoded, err := packet.Decode(frame)
		testhost.Must(t, err)
		var want []string
		for _, segment := range decoded.Headers[0].SRH.Segments {
			want = append(want, segment.String())
		}
		const segments, left = "ipv6.routing.srh.addr", "ipv6.routing.segleft"
		d := packettest.Dissect(t, [][]byte{frame}, segments, left)[0]
		var got []string
		for _, text := range d.Fields[segments] {
			got = append(got, netip.MustParseAddr(text).String())
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: tshark reads the segments %v, want %v", e.name, got, want)
		}
		if got, want := fmt.Sprint(d.Fields[left]), fmt.Sprintf("[%d]", decoded.Headers[0].SRH.SegmentsLeft); got != want {
			t.Errorf("%s: tshark reads segments left %s, want %s", e.name, got, want)
		}
	}
}

// tshark reports errors. Otherwise the other tests would prove nothing.
func TestTsharkObjects(t *testing.T) {
	frame := packet.TCP(client6, vip6)
	transport := packet.TransportOffset(frame)
	inserted, err := packet.Encapsulate(frame, srv6Encap("srv6-insert", deliver1))
	testhost.Must(t, err)
	v4 := packet.TCP(client4, vip4)
	broken := [][]byte{
		packet.FlipByte(frame, transport+16),
		packet.FlipByte(v4, 14+10),
		packet.FlipByte(inserted, 14+40+8+15), // the VIP in the segment list
		packet.Truncate(frame, len(frame)-4),
	}
	for i, d := range packettest.Dissect(t, broken) {
		if len(d.Problems) == 0 {
			t.Errorf("frame %d (%s): no objection", i, d.Protocols)
		}
	}
}
