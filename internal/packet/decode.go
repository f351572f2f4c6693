// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"fmt"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// Packet is a decoded frame.
type Packet struct {
	Source, Destination MAC
	VLANs               []uint16
	// Headers are the IP headers, the outermost first. The last one is the client's own.
	Headers []Header
	// SourcePort and DestinationPort are those of TCP and UDP. They are 0 for other protocols.
	SourcePort, DestinationPort uint16
	Flags                       TCPFlags
	// ICMPType and ICMPCode are those of ICMP or ICMPv6. The Protocol of the last header tells
	// which.
	ICMPType, ICMPCode uint8
	Payload            []byte // after the transport header
}

// Header is an IP header with its extension headers.
type Header struct {
	Source, Destination netip.Addr
	TrafficClass        uint8
	FlowLabel           uint32
	HopLimit            uint8
	// SRH is the segment routing header, or nil.
	SRH *SRH
	// Protocol is the protocol after the extension headers.
	Protocol layers.IPProtocol
	// Fragment tells that the packet is a fragment. FragmentOffset is in bytes.
	Fragment       bool
	FragmentOffset int
}

// FinalDestination returns the address to which the packet is finally delivered. If the packet has
// an inserted segment routing header with segments left, this is the last segment. Otherwise it is
// the destination.
func (h Header) FinalDestination() netip.Addr {
	if h.SRH != nil && h.SRH.SegmentsLeft > 0 && !h.carriesIP() {
		return h.SRH.Segments[0]
	}
	return h.Destination
}

// carriesIP tells whether an inner IP packet follows the header, directly or after a GRE header.
func (h Header) carriesIP() bool {
	switch h.Protocol {
	case layers.IPProtocolIPv4, layers.IPProtocolIPv6, layers.IPProtocolGRE:
		return true
	}
	return false
}

// Decode decodes a frame. If a header cannot be read, Decode returns an error about it, and a
// packet with the headers before it.
func Decode(frame []byte) (*Packet, error) {
	p := &Packet{}
	headers, failure := headersOf(frame)
	for _, layer := range headers {
		if err := p.add(layer); err != nil {
			return p, err
		}
	}
	if failure != nil {
		return p, fmt.Errorf("decode after %d IP headers: %w", len(p.Headers), failure)
	}
	if len(p.Headers) == 0 {
		return p, fmt.Errorf("frame of %d bytes: %w", len(frame), ErrNotIP)
	}
	return p, nil
}

// headersOf returns the layers of a frame up to the transport header. It ignores the layers that
// gopacket finds after it: for UDP, gopacket only guesses them by the port.
func headersOf(frame []byte) ([]gopacket.Layer, error) {
	decoded := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.DecodeOptions{NoCopy: true})
	var out []gopacket.Layer
	for _, layer := range decoded.Layers() {
		if failure, ok := layer.(gopacket.ErrorLayer); ok {
			return out, failure.Error()
		}
		if !complete(layer) {
			continue
		}
		out = append(out, layer)
		switch layer.(type) {
		case *layers.TCP, *layers.UDP, *layers.ICMPv4, *layers.ICMPv6:
			return out, nil
		}
	}
	if failure := decoded.ErrorLayer(); failure != nil {
		return out, failure.Error()
	}
	return out, nil
}

// complete returns false for a layer that gopacket adds although it fails to read it.
func complete(layer gopacket.Layer) bool {
	switch l := layer.(type) {
	case *layers.IPv4:
		return len(l.DstIP) > 0
	case *layers.IPv6:
		return len(l.DstIP) > 0
	}
	return len(layer.LayerContents()) > 0
}

// add adds the fields of a layer to the packet. An extension header changes the last IP header. add
// ignores layers of other types.
func (p *Packet) add(layer gopacket.Layer) error {
	switch l := layer.(type) {
	case *layers.Ethernet:
		p.Source, p.Destination = MAC(l.SrcMAC), MAC(l.DstMAC)
	case *layers.Dot1Q:
		p.VLANs = append(p.VLANs, l.VLANIdentifier)
	case *layers.IPv4:
		return p.addIPv4(l)
	case *layers.IPv6:
		return p.addIPv6(l)
	case *layers.IPv6HopByHop:
		p.last().Protocol = l.NextHeader
	case *layers.IPv6Destination:
		p.last().Protocol = l.NextHeader
	case *layers.IPv6Fragment:
		h := p.last()
		h.Protocol, h.FragmentOffset = l.NextHeader, int(l.FragmentOffset)*8
		h.Fragment = l.MoreFragments || l.FragmentOffset != 0
	case *layers.IPv6Routing:
		return p.addRouting(l)
	case *layers.TCP:
		p.SourcePort, p.DestinationPort = uint16(l.SrcPort), uint16(l.DstPort)
		p.Flags, p.Payload = TCPFlags(l.Contents[13]), l.Payload
	case *layers.UDP:
		p.SourcePort, p.DestinationPort, p.Payload = uint16(l.SrcPort), uint16(l.DstPort), l.Payload
	case *layers.ICMPv4:
		p.ICMPType, p.ICMPCode, p.Payload = l.TypeCode.Type(), l.TypeCode.Code(), l.Payload
	case *layers.ICMPv6:
		p.ICMPType, p.ICMPCode, p.Payload = l.TypeCode.Type(), l.TypeCode.Code(), l.Payload
	}
	return nil
}

// addIPv4 adds an IPv4 header. It returns an error if the packet is shorter than the header says.
func (p *Packet) addIPv4(l *layers.IPv4) error {
	p.Headers = append(p.Headers, Header{
		Source: netip.AddrFrom4([4]byte(l.SrcIP)), Destination: netip.AddrFrom4([4]byte(l.DstIP)),
		TrafficClass: l.TOS, HopLimit: l.TTL, Protocol: l.Protocol,
		Fragment:       l.Flags&layers.IPv4MoreFragments != 0 || l.FragOffset != 0,
		FragmentOffset: int(l.FragOffset) * 8,
	})
	return checkLength(int(l.Length), len(l.Contents)+len(l.Payload))
}

// addIPv6 adds an IPv6 header. It returns an error if the packet is shorter than the header says.
func (p *Packet) addIPv6(l *layers.IPv6) error {
	p.Headers = append(p.Headers, Header{
		Source: netip.AddrFrom16([16]byte(l.SrcIP)), Destination: netip.AddrFrom16([16]byte(l.DstIP)),
		TrafficClass: l.TrafficClass, FlowLabel: l.FlowLabel, HopLimit: l.HopLimit, Protocol: l.NextHeader,
	})
	present := len(l.Payload)
	if l.HopByHop != nil { // gopacket treats it as a part of the IPv6 header
		present += len(l.HopByHop.Contents)
	}
	return checkLength(int(l.Length), present)
}

// checkLength returns an error if a header announces more bytes than are present.
func checkLength(announced, present int) error {
	if announced > present {
		return fmt.Errorf("length of %d bytes where there are %d: %w", announced, present, ErrTruncated)
	}
	return nil
}

// addRouting adds a segment routing header to the last IP header. Of a routing header of another
// type, it only takes the protocol that follows.
func (p *Packet) addRouting(l *layers.IPv6Routing) error {
	h := p.last()
	h.Protocol = l.NextHeader
	if l.RoutingType != routingTypeSRH {
		return nil
	}
	srh, err := parseSRH(l.Contents)
	if err != nil {
		return err
	}
	h.SRH = srh
	return nil
}

// last returns the header that was added last.
func (p *Packet) last() *Header { return &p.Headers[len(p.Headers)-1] }

// Verify returns an error if a checksum in a frame is wrong. It checks those of IPv4, TCP, UDP and
// ICMP, also in inner packets. It does not check the transport checksum of a fragment.
func Verify(frame []byte) error {
	headers, err := headersOf(frame)
	if err != nil {
		return fmt.Errorf("verify checksums: %w", err)
	}
	var network gopacket.NetworkLayer
	for _, layer := range headers {
		if l, ok := layer.(gopacket.NetworkLayer); ok {
			network = l
		}
		if l, ok := layer.(interface {
			SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
		}); ok {
			if err := l.SetNetworkLayerForChecksum(network); err != nil {
				return fmt.Errorf("verify %v checksum: %w", layer.LayerType(), err)
			}
		}
		if err := verifyLayer(layer); err != nil {
			return err
		}
	}
	return nil
}

// verifyLayer returns an error if a layer has a checksum, and it is wrong.
func verifyLayer(layer gopacket.Layer) error {
	l, ok := layer.(gopacket.LayerWithChecksum)
	if !ok {
		return nil
	}
	err, result := l.VerifyChecksum()
	if err != nil {
		return fmt.Errorf("verify %v checksum: %w", layer.LayerType(), err)
	}
	if !result.Valid {
		return fmt.Errorf("%v checksum is %#04x, should be %#04x", layer.LayerType(), result.Actual, result.Correct)
	}
	return nil
}
