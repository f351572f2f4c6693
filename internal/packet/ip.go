// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Protocol and next header numbers (IANA assigned internet protocol numbers).
const (
	protocolHopByHop    = 0
	protocolIPv4        = 4
	protocolIPv6        = 41
	protocolRouting     = 43
	protocolFragment    = 44
	protocolGRE         = 47
	protocolDestination = 60
)

const (
	ipv4Length     = 20
	ipv6Length     = 40
	ipv6NextHeader = 6     // offset of the field
	extensionUnit  = 8     // unit of extension headers' lengths, in bytes (RFC 8200 section 4)
	maxLength      = 65535 // of a length field, in bytes
)

// ipHeader has the fields of an IPv4 or IPv6 header that the encapsulations use. Lengths are in
// bytes.
type ipHeader struct {
	version      int
	length       int // of the header, with IPv4 options but without IPv6 extension headers
	total        int // of the packet with the header
	protocol     uint8
	trafficClass uint8 // TOS in IPv4
	hopLimit     uint8 // TTL in IPv4
	fragment     bool  // an IPv4 fragment
	source       netip.Addr
	destination  netip.Addr
}

// parseFrame finds the IP packet of a frame. It returns the offset of the IP header, and the
// header. It returns an error if the EtherType does not agree with the IP version.
func parseFrame(frame []byte) (network int, ip ipHeader, err error) {
	network, err = networkOffset(frame)
	if err != nil {
		return 0, ipHeader{}, err
	}
	version := 0
	switch etherType := etherTypeBefore(frame, network); etherType {
	case etherTypeIPv4:
		version = 4
	case etherTypeIPv6:
		version = 6
	default:
		return 0, ipHeader{}, fmt.Errorf("EtherType %#04x: %w", etherType, ErrNotIP)
	}
	ip, err = parseIP(frame[network:], version)
	return network, ip, err
}

// parseIP reads the IP header at the start of p. It returns an error if the header has another
// version, or if the packet is longer than p. Other bytes may follow the packet.
func parseIP(p []byte, version int) (ipHeader, error) {
	if len(p) == 0 {
		return ipHeader{}, fmt.Errorf("no byte of an IP header: %w", ErrTruncated)
	}
	if got := int(p[0] >> 4); got != version {
		return ipHeader{}, fmt.Errorf("version %d where %d is announced: %w", got, version, ErrNotIP)
	}
	parse := parseIPv6
	if version == 4 {
		parse = parseIPv4
	}
	ip, err := parse(p)
	if err != nil {
		return ipHeader{}, err
	}
	if ip.total > len(p) {
		return ipHeader{}, fmt.Errorf("length of %d bytes where there are %d: %w", ip.total, len(p), ErrTruncated)
	}
	return ip, nil
}

// parseIPv4 reads the IPv4 header at the start of p. It returns an error if p is too short for a
// header, or if the lengths in the header contradict each other.
func parseIPv4(p []byte) (ipHeader, error) {
	if len(p) < ipv4Length {
		return ipHeader{}, fmt.Errorf("%d bytes of an IPv4 header: %w", len(p), ErrTruncated)
	}
	ip := ipHeader{
		version:      4,
		length:       int(p[0]&0xf) * 4,
		total:        int(binary.BigEndian.Uint16(p[2:])),
		protocol:     p[9],
		trafficClass: p[1],
		hopLimit:     p[8],
		fragment:     binary.BigEndian.Uint16(p[6:])&0x3fff != 0, // more fragments, or an offset
		source:       netip.AddrFrom4([4]byte(p[12:16])),
		destination:  netip.AddrFrom4([4]byte(p[16:20])),
	}
	if ip.length < ipv4Length || ip.total < ip.length {
		return ipHeader{}, fmt.Errorf("IPv4 header length %d, total length %d: %w", ip.length, ip.total, ErrHeader)
	}
	return ip, nil
}

// parseIPv6 reads the IPv6 header at the start of p. It returns an error if p is too short for a
// header.
func parseIPv6(p []byte) (ipHeader, error) {
	if len(p) < ipv6Length {
		return ipHeader{}, fmt.Errorf("%d bytes of an IPv6 header: %w", len(p), ErrTruncated)
	}
	return ipHeader{
		version:      6,
		length:       ipv6Length,
		total:        ipv6Length + int(binary.BigEndian.Uint16(p[4:])),
		protocol:     p[ipv6NextHeader],
		trafficClass: trafficClass(p),
		hopLimit:     p[7],
		source:       netip.AddrFrom16([16]byte(p[8:24])),
		destination:  netip.AddrFrom16([16]byte(p[24:40])),
	}, nil
}

func trafficClass(ipv6 []byte) uint8 { return uint8(binary.BigEndian.Uint16(ipv6) >> 4) }

// extensionLength returns the length in bytes of the IPv6 extension header at the start of p. It
// returns an error if the header extends beyond the end of p.
func extensionLength(p []byte) (int, error) {
	if len(p) < extensionUnit {
		return 0, fmt.Errorf("%d bytes of an extension header: %w", len(p), ErrTruncated)
	}
	length := (int(p[1]) + 1) * extensionUnit
	if length > len(p) {
		return 0, fmt.Errorf("extension header of %d bytes where there are %d: %w", length, len(p), ErrTruncated)
	}
	return length, nil
}

// skipHopByHop skips the hop-by-hop options of an IPv6 packet, which must be the first extension
// header (RFC 8200 section 4.1). at is the offset of the header after them. nextHeader is the
// offset of the next header field that announces that header.
func skipHopByHop(p []byte) (at, nextHeader int, err error) {
	if p[ipv6NextHeader] != protocolHopByHop {
		return ipv6Length, ipv6NextHeader, nil
	}
	length, err := extensionLength(p[ipv6Length:])
	if err != nil {
		return 0, 0, fmt.Errorf("hop-by-hop options: %w", err)
	}
	return ipv6Length + length, ipv6Length, nil
}

// TakeHop returns the frame with a decremented hop limit. It returns an error if the frame has no
// IP packet, or if the hop limit is 1 or 0.
func TakeHop(frame []byte) ([]byte, error) {
	out := bytes.Clone(frame)
	network, ip, err := parseFrame(out)
	if err != nil {
		return nil, err
	}
	return out, decrementHopLimit(out[network:], ip)
}

// decrementHopLimit decrements the hop limit, as every router does. It updates the IPv4 checksum
// instead of computing it, so that a wrong checksum stays wrong.
func decrementHopLimit(p []byte, ip ipHeader) error {
	if ip.hopLimit <= 1 {
		return fmt.Errorf("hop limit %d: %w", ip.hopLimit, ErrHopLimit)
	}
	setHopLimit(p, ip.version, ip.hopLimit-1)
	return nil
}

// setHopLimit sets the hop limit of an IP packet.
func setHopLimit(p []byte, version int, limit uint8) {
	if version == 6 {
		p[7] = limit
		return
	}
	setIPv4Byte(p, 8, limit)
}

// setIPv4Byte changes a byte of an IPv4 header and updates the checksum.
func setIPv4Byte(p []byte, offset int, value uint8) {
	word := offset &^ 1
	before := binary.BigEndian.Uint16(p[word:])
	p[offset] = value
	after := binary.BigEndian.Uint16(p[word:])
	sum := binary.BigEndian.Uint16(p[10:])
	binary.BigEndian.PutUint16(p[10:], updateChecksum(sum, before, after))
}

// setICMPType changes the type of an ICMP message and updates the checksum.
func setICMPType(p []byte, icmpType uint8) {
	before := binary.BigEndian.Uint16(p)
	p[0] = icmpType
	after := binary.BigEndian.Uint16(p)
	sum := binary.BigEndian.Uint16(p[2:])
	binary.BigEndian.PutUint16(p[2:], updateChecksum(sum, before, after))
}

// updateChecksum returns the checksum after one 16-bit word has changed (RFC 1624 section 3,
// equation 3).
func updateChecksum(sum, before, after uint16) uint16 {
	return ^fold(uint32(^sum) + uint32(^before) + uint32(after))
}

// checksum returns the internet checksum (RFC 1071) of an even number of bytes.
func checksum(p []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(p); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	return ^fold(sum)
}

// fold adds the carries of a sum of 16-bit words to it.
func fold(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
