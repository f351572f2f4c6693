// SPDX-License-Identifier: Apache-2.0

package packet

import (
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
	ipv6NextHeader = 6 // offset of the field
	extensionUnit  = 8 // RFC 8200 section 4: the unit of extension headers' lengths
	maxLength      = 65535
)

// ipHeader is what the encapsulations need to know of an IPv4 or IPv6 header.
type ipHeader struct {
	version      int
	length       int // of the header, options included, without extension headers
	total        int // of the packet, as the header says
	protocol     uint8
	trafficClass uint8 // TOS in IPv4
	hopLimit     uint8 // TTL in IPv4
	fragment     bool  // an IPv4 fragment
	source       netip.Addr
	destination  netip.Addr
}

// parseFrame finds the IP packet of a frame and checks that the EtherType agrees with its version.
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

// parseIP reads the IP header at the start of p, which must be of the version and whose packet must
// not be longer than p; p may go on after it.
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

// extensionLength is the length in bytes of the IPv6 extension header at the start of p, which must
// hold all of it.
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

// skipHopByHop passes the hop-by-hop options of an IPv6 packet, which no other header may precede
// (RFC 8200 section 4.1). It answers with the offsets of what follows and of the next header field
// that names it.
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

// decrementHopLimit does to a packet what every router does. The IPv4 checksum is updated, not
// computed anew, so that a wrong one stays wrong.
func decrementHopLimit(p []byte, ip ipHeader) error {
	if ip.hopLimit <= 1 {
		return fmt.Errorf("hop limit %d: %w", ip.hopLimit, ErrHopLimit)
	}
	setHopLimit(p, ip.version, ip.hopLimit-1)
	return nil
}

func setHopLimit(p []byte, version int, limit uint8) {
	if version == 6 {
		p[7] = limit
		return
	}
	setIPv4Byte(p, 8, limit)
}

// setIPv4Byte changes a byte of an IPv4 header and its checksum.
func setIPv4Byte(p []byte, offset int, value uint8) {
	word := offset &^ 1
	before := binary.BigEndian.Uint16(p[word:])
	p[offset] = value
	after := binary.BigEndian.Uint16(p[word:])
	sum := binary.BigEndian.Uint16(p[10:])
	binary.BigEndian.PutUint16(p[10:], updateChecksum(sum, before, after))
}

// setICMPType changes the type of an ICMP message and its checksum.
func setICMPType(p []byte, icmpType uint8) {
	before := binary.BigEndian.Uint16(p)
	p[0] = icmpType
	after := binary.BigEndian.Uint16(p)
	sum := binary.BigEndian.Uint16(p[2:])
	binary.BigEndian.PutUint16(p[2:], updateChecksum(sum, before, after))
}

// updateChecksum is equation 3 of RFC 1624 section 3: the checksum after one 16-bit word changed.
func updateChecksum(sum, before, after uint16) uint16 {
	return ^fold(uint32(^sum) + uint32(^before) + uint32(after))
}

// checksum is the internet checksum of RFC 1071 over an even number of bytes.
func checksum(p []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(p); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(p[i:]))
	}
	return ^fold(sum)
}

func fold(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
