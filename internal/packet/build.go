// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// TCP returns a frame with a TCP segment from src to dst. The IP version is that of the addresses.
// By default the segment is a SYN without options or payload. All checksums are correct.
//
// Like all builders of this package, TCP panics if the arguments cannot make a packet, for example
// if the addresses have different IP versions.
func TCP(src, dst netip.AddrPort, options ...Option) []byte {
	s := newSpec(src.Addr(), dst.Addr(), layers.IPProtocolTCP, options)
	tcp := s.tcp
	tcp.SrcPort, tcp.DstPort = layers.TCPPort(src.Port()), layers.TCPPort(dst.Port())
	must(tcp.SetNetworkLayerForChecksum(s.pseudoHeader()))
	return s.frame(&tcp)
}

// UDP returns a frame with a UDP datagram from src to dst. By default the datagram is empty.
func UDP(src, dst netip.AddrPort, options ...Option) []byte {
	s := newSpec(src.Addr(), dst.Addr(), layers.IPProtocolUDP, options)
	udp := layers.UDP{SrcPort: layers.UDPPort(src.Port()), DstPort: layers.UDPPort(dst.Port())}
	must(udp.SetNetworkLayerForChecksum(s.pseudoHeader()))
	return s.frame(&udp)
}

// ICMP returns a frame with a message of ICMP or ICMPv6, by the IP version of the addresses. rest
// is the four bytes after the checksum. The payload follows them.
func ICMP(src, dst netip.Addr, icmpType, code uint8, rest uint32, options ...Option) []byte {
	if src.Is4() {
		s := newSpec(src, dst, layers.IPProtocolICMPv4, options)
		return s.frame(&layers.ICMPv4{
			TypeCode: layers.CreateICMPv4TypeCode(icmpType, code), Id: uint16(rest >> 16), Seq: uint16(rest),
		})
	}
	s := newSpec(src, dst, layers.IPProtocolICMPv6, options)
	icmp := layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(icmpType, code)}
	must(icmp.SetNetworkLayerForChecksum(s.pseudoHeader()))
	// Every ICMPv6 message that Segue handles has two 16-bit fields or one 32-bit field here.
	return s.frame(&icmp, &layers.ICMPv6Echo{Identifier: uint16(rest >> 16), SeqNumber: uint16(rest)})
}

// ICMPError returns the ICMP error that a router sends to the source of the packet in a frame. The
// error quotes as much of the packet as RFC 4443 section 3 and RFC 1812 section 4.3.2.3 say: with
// all headers, it has at most 1280 bytes for IPv6, and 576 bytes for IPv4. rest is the same as in
// ICMP. In a packet too big message of ICMPv6, it is the MTU.
func ICMPError(router netip.Addr, icmpType, code uint8, rest uint32, frame []byte, options ...Option) []byte {
	network, ip, err := parseFrame(frame)
	must(err)
	const icmpLength = 8
	limit := 1280 - ipv6Length - icmpLength
	if ip.version == 4 {
		limit = 576 - ipv4Length - icmpLength
	}
	quoted := frame[network : network+min(ip.total, limit)]
	return ICMP(router, ip.source, icmpType, code, rest, append(options, Payload(quoted))...)
}

// frame serialises the headers of the spec, the transport headers and the payload.
func (s *spec) frame(transport ...gopacket.SerializableLayer) []byte {
	network := s.ipv6
	if s.src.Is4() {
		network = s.ipv4
	}
	buffer := gopacket.NewSerializeBuffer()
	must(gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		append(append(network(), transport...), gopacket.Payload(s.payload))...))
	return append(s.link(), buffer.Bytes()...)
}

// link returns the Ethernet header and the VLAN tags. It does not use gopacket, which would pad
// every frame to 60 bytes.
func (s *spec) link() []byte {
	b := slices.Concat(s.dstMAC[:], s.srcMAC[:])
	for _, id := range s.vlans {
		b = binary.BigEndian.AppendUint16(b, etherTypeVLAN)
		b = binary.BigEndian.AppendUint16(b, id)
	}
	if s.src.Is4() {
		return binary.BigEndian.AppendUint16(b, etherTypeIPv4)
	}
	return binary.BigEndian.AppendUint16(b, etherTypeIPv6)
}

// ipv4 returns the IPv4 header.
func (s *spec) ipv4() []gopacket.SerializableLayer {
	return []gopacket.SerializableLayer{&layers.IPv4{
		Version: 4, TOS: s.trafficClass, Id: s.id, Flags: layers.IPv4DontFragment, TTL: s.hopLimit,
		Protocol: s.protocol, SrcIP: s.src.AsSlice(), DstIP: s.dst.AsSlice(),
		Padding: s.ipOptions, // gopacket copies it unless it has options of its own
	}}
}

// ipv6 returns the IPv6 header and the extension headers. Each has the number of the header after
// it.
func (s *spec) ipv6() []gopacket.SerializableLayer {
	header := &layers.IPv6{
		Version: 6, TrafficClass: s.trafficClass, FlowLabel: s.flowLabel, HopLimit: s.hopLimit,
		SrcIP: s.src.AsSlice(), DstIP: s.ipv6Destination().AsSlice(),
	}
	out := make([]gopacket.SerializableLayer, len(s.extensions))
	next := s.protocol
	for i := len(s.extensions) - 1; i >= 0; i-- {
		out[i] = s.extensions[i].layer(next)
		next = s.extensions[i].protocol
	}
	header.NextHeader = next
	return append([]gopacket.SerializableLayer{header}, out...)
}

// pseudoHeader returns the addresses for the transport checksum. The destination is the final one,
// even if the packet travels to another segment first (RFC 8200 section 8.1).
func (s *spec) pseudoHeader() gopacket.NetworkLayer {
	if s.src.Is4() {
		return &layers.IPv4{SrcIP: s.src.AsSlice(), DstIP: s.dst.AsSlice()}
	}
	return &layers.IPv6{SrcIP: s.src.AsSlice(), DstIP: s.dst.AsSlice()}
}

// must panics if there is an error.
func must(err error) {
	if err != nil {
		panic(fmt.Sprintf("packet: %v", err))
	}
}
