// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// Option changes the packet that a builder makes.
type Option func(*spec)

// spec is a packet to be built.
type spec struct {
	srcMAC, dstMAC MAC
	vlans          []uint16
	src, dst       netip.Addr
	protocol       layers.IPProtocol
	trafficClass   uint8
	flowLabel      uint32
	hopLimit       uint8
	id             uint16
	ipOptions      []byte
	extensions     []extension
	path           *SRH       // the segment routing header; nil: none
	tcp            layers.TCP // flags, numbers, window and options
	payload        []byte
}

// extension is an IPv6 extension header. layer makes it when the number of the next header is
// known.
type extension struct {
	protocol layers.IPProtocol
	layer    func(next layers.IPProtocol) gopacket.SerializableLayer
}

// newSpec returns the defaults for a packet, changed by the options.
func newSpec(src, dst netip.Addr, protocol layers.IPProtocol, options []Option) *spec {
	if src.Is4() != dst.Is4() {
		must(fmt.Errorf("addresses %v and %v: %w", src, dst, ErrFamily))
	}
	s := &spec{
		srcMAC: MAC{0x02, 0, 0, 0, 0, 0x01}, dstMAC: MAC{0x02, 0, 0, 0, 0, 0x02},
		src: src, dst: dst, protocol: protocol, hopLimit: 64,
		tcp: layers.TCP{SYN: true, Window: 65535},
	}
	for _, option := range options {
		option(s)
	}
	return s
}

// Ethernet sets the Ethernet addresses of the frame.
func Ethernet(src, dst MAC) Option { return func(s *spec) { s.srcMAC, s.dstMAC = src, dst } }

// VLAN adds 802.1Q tags to the frame, the outermost first.
func VLAN(ids ...uint16) Option { return func(s *spec) { s.vlans = ids } }

// TrafficClass sets the traffic class or the IPv4 TOS: DSCP and ECN together.
func TrafficClass(class uint8) Option { return func(s *spec) { s.trafficClass = class } }

// FlowLabel sets the IPv6 flow label, 20 bits.
func FlowLabel(label uint32) Option { return func(s *spec) { s.flowLabel = label } }

// HopLimit sets the hop limit or the IPv4 TTL. The default is 64.
func HopLimit(limit uint8) Option { return func(s *spec) { s.hopLimit = limit } }

// ID sets the IPv4 identification.
func ID(id uint16) Option { return func(s *spec) { s.id = id } }

// IPOptions sets the IPv4 options as bytes, at most 40. Zeros fill the last 32-bit word.
func IPOptions(options []byte) Option {
	if len(options) > 40 {
		must(fmt.Errorf("%d bytes of IPv4 options, at most 40: %w", len(options), ErrHeader))
	}
	return func(s *spec) { s.ipOptions = options }
}

// Payload sets the bytes after the transport header.
func Payload(payload []byte) Option { return func(s *spec) { s.payload = payload } }

// HopByHop appends a header of hop-by-hop options that contains only padding. size is its size in
// bytes, a multiple of 8 from 8 to 2048. The extension headers of a packet are in the order of the
// Options that append them.
func HopByHop(size int) Option {
	options := padding(size)
	return appendExtension(layers.IPProtocolIPv6HopByHop, func(next layers.IPProtocol) gopacket.SerializableLayer {
		header := &layers.IPv6HopByHop{}
		header.NextHeader = next
		for _, data := range options {
			header.Options = append(header.Options, &layers.IPv6HopByHopOption{
				OptionType: optionPadN, OptionLength: uint8(len(data)), OptionData: data})
		}
		return header
	})
}

// DestinationOptions appends a header of destination options that contains only padding. size is
// the same as in HopByHop.
func DestinationOptions(size int) Option {
	options := padding(size)
	return appendExtension(layers.IPProtocolIPv6Destination, func(next layers.IPProtocol) gopacket.SerializableLayer {
		header := &layers.IPv6Destination{}
		header.NextHeader = next
		for _, data := range options {
			header.Options = append(header.Options, &layers.IPv6DestinationOption{
				OptionType: optionPadN, OptionLength: uint8(len(data)), OptionData: data})
		}
		return header
	})
}

// Routing appends a segment routing header, and makes its active segment the packet's destination.
// Checksums use the builder's dst, which should be the first entry of the header's segment list.
func Routing(srh *SRH) Option {
	extend := appendExtension(layers.IPProtocolIPv6Routing, func(next layers.IPProtocol) gopacket.SerializableLayer {
		header := *srh
		header.NextHeader = next
		return &header
	})
	return func(s *spec) {
		s.path = srh
		extend(s)
	}
}

// appendExtension appends an extension header. layer makes it when the number of the next header is
// known.
func appendExtension(protocol layers.IPProtocol, layer func(layers.IPProtocol) gopacket.SerializableLayer) Option {
	return func(s *spec) { s.extensions = append(s.extensions, extension{protocol, layer}) }
}

// ipv6Destination returns the destination in the IPv6 header: the active segment, or else dst.
func (s *spec) ipv6Destination() netip.Addr {
	if s.path != nil {
		if active, ok := s.path.Active(); ok {
			return active
		}
	}
	return s.dst
}

// optionPadN is the type of the padding option PadN, of 2 or more bytes (RFC 8200 section 4.2).
const optionPadN = 1

// padding returns the data of each PadN option, so that the options fill an options header of size
// bytes.
func padding(size int) [][]byte {
	if size < extensionUnit || size > 256*extensionUnit || size%extensionUnit != 0 {
		must(fmt.Errorf("options header of %d bytes: %w", size, ErrHeader))
	}
	var out [][]byte
	for left := size - 2; left > 0; { // 2: the fields next header and length
		option := min(left, 2+255) // type, length, and at most 255 bytes of data
		if left-option == 1 {      // one remaining byte would be too short for an option
			option--
		}
		out = append(out, make([]byte, option-2))
		left -= option
	}
	return out
}

// TCPFlags are the flags of a TCP segment.
type TCPFlags uint8

// The flags of RFC 9293 section 3.1, with their bits in the header.
const (
	FIN TCPFlags = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
	ECE
	CWR
)

// Flags sets the TCP flags in f, and clears all others.
func Flags(f TCPFlags) Option {
	return func(s *spec) {
		t := &s.tcp
		t.FIN, t.SYN, t.RST, t.PSH = f&FIN != 0, f&SYN != 0, f&RST != 0, f&PSH != 0
		t.ACK, t.URG, t.ECE, t.CWR = f&ACK != 0, f&URG != 0, f&ECE != 0, f&CWR != 0
	}
}

// Sequence sets the TCP sequence and acknowledgment numbers.
func Sequence(seq, ack uint32) Option { return func(s *spec) { s.tcp.Seq, s.tcp.Ack = seq, ack } }

// Window sets the TCP window, without scaling. The default is 65535.
func Window(size uint16) Option { return func(s *spec) { s.tcp.Window = size } }

// MSS appends the maximum segment size, in bytes, to the TCP options.
func MSS(size uint16) Option {
	return TCPOption(layers.TCPOptionKindMSS, binary.BigEndian.AppendUint16(nil, size))
}

// Timestamps appends timestamps (RFC 7323) to the TCP options, after two no-operations for
// alignment.
func Timestamps(value, echo uint32) Option {
	data := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, value), echo)
	timestamps := TCPOption(layers.TCPOptionKindTimestamps, data)
	return func(s *spec) {
		nop := layers.TCPOption{OptionType: layers.TCPOptionKindNop, OptionLength: 1}
		s.tcp.Options = append(s.tcp.Options, nop, nop)
		timestamps(s)
	}
}

// TCPOption appends an option with its data to the TCP options.
func TCPOption(kind layers.TCPOptionKind, data []byte) Option {
	return func(s *spec) {
		s.tcp.Options = append(s.tcp.Options, layers.TCPOption{
			OptionType: kind, OptionLength: uint8(2 + len(data)), OptionData: data})
	}
}
