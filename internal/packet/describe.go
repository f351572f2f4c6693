// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/srv6"
)

// String describes the packet in one line: the client's flow, the inserted segment list, and the
// outer headers, for example
//
//	2001:db8:c::2.40000 > 2001:db8:80::1.80 tcp [S] in ip6(fd00:6c:0:1:: > fd00:5:0:1::dv)
//
// Segments are in the order of travel. A star marks the segment that the packet travels to.
func (p *Packet) String() string {
	if len(p.Headers) == 0 {
		return "no IP packet"
	}
	last := len(p.Headers) - 1
	inner := p.Headers[last]
	words := []string{p.flow(inner)}
	if inner.SRH != nil {
		words = append(words, inner.SRH.describe(true))
	}
	for _, h := range slices.Backward(p.Headers[:last]) {
		words = append(words, h.describeTunnel())
		if h.SRH != nil {
			words = append(words, h.SRH.describe(false))
		}
	}
	return strings.Join(words, " ")
}

// flow describes the client's flow. h is the client's own header.
func (p *Packet) flow(h Header) string {
	src, dst := h.Source.String(), h.FinalDestination().String()
	if h.FragmentOffset > 0 {
		return fmt.Sprintf("%s > %s %s fragment at %d", src, dst, strings.ToLower(h.Protocol.String()), h.FragmentOffset)
	}
	switch h.Protocol {
	case layers.IPProtocolTCP:
		return fmt.Sprintf("%s.%d > %s.%d tcp [%v]", src, p.SourcePort, dst, p.DestinationPort, p.Flags)
	case layers.IPProtocolUDP:
		return fmt.Sprintf("%s.%d > %s.%d udp", src, p.SourcePort, dst, p.DestinationPort)
	case layers.IPProtocolICMPv4:
		return fmt.Sprintf("%s > %s icmp %v", src, dst, layers.CreateICMPv4TypeCode(p.ICMPType, p.ICMPCode))
	case layers.IPProtocolICMPv6:
		return fmt.Sprintf("%s > %s icmp6 %v", src, dst, layers.CreateICMPv6TypeCode(p.ICMPType, p.ICMPCode))
	}
	return fmt.Sprintf("%s > %s protocol %d", src, dst, uint8(h.Protocol))
}

// describeTunnel describes an outer header.
func (h Header) describeTunnel() string {
	kind := "ip6"
	if h.Protocol == layers.IPProtocolGRE {
		kind = "gre"
	} else if h.Source.Is4() {
		kind = "ip4"
	}
	return fmt.Sprintf("in %s(%v > %s)", kind, h.Source, segmentName(h.Destination))
}

// describe describes a segment routing header. It writes each segment as a SID, with its function.
// The last segment of an inserted header is the address of the VIP or the client, and is written as
// such.
func (s *SRH) describe(inserted bool) string {
	names := make([]string, len(s.Segments))
	for i, segment := range s.Segments {
		name := segmentName(segment)
		if i == 0 && inserted {
			name = segment.String()
		}
		if i == int(s.SegmentsLeft) {
			name += "*"
		}
		names[len(names)-1-i] = name
	}
	return fmt.Sprintf("srh(sl=%d: %s)", s.SegmentsLeft, strings.Join(names, " → "))
}

// segmentName returns an IPv6 address as a SID, and an IPv4 address unchanged.
func segmentName(addr netip.Addr) string {
	if addr.Is4() {
		return addr.String()
	}
	return srv6.Parse(addr).String()
}

// String returns the flags as tcpdump writes them, such as "S.".
func (f TCPFlags) String() string {
	var b strings.Builder
	for _, flag := range []struct {
		bit    TCPFlags
		letter byte
	}{{FIN, 'F'}, {SYN, 'S'}, {RST, 'R'}, {PSH, 'P'}, {ACK, '.'}, {URG, 'U'}, {ECE, 'E'}, {CWR, 'W'}} {
		if f&flag.bit != 0 {
			b.WriteByte(flag.letter)
		}
	}
	return b.String()
}
