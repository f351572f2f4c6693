// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/internal/desired"
)

const (
	outerHopLimit = 64
	maxFlowLabel  = 1<<20 - 1
	greLength     = 4      // of a GRE header, in bytes
	dontFragment  = 0x4000 // in the field of IPv4 flags and fragment offset
)

// Encap describes how a packet is encapsulated for its servers.
type Encap struct {
	Kind desired.Encapsulation

	// Sender is the balancer's address in its locator, with function and argument zero. It is only
	// for srv6-insert and srv6-encap.
	Sender netip.Addr
	// Segments are the servers' SIDs in the order of travel, at least one. They are only for
	// srv6-insert and srv6-encap.
	Segments []netip.Addr
	// Whole puts the first segment into the list, too. It is only for srv6-encap with several
	// segments.
	Whole bool

	// Source and Destination are the outer addresses, of the same IP version. They are only for gre
	// and ipip.
	Source, Destination netip.Addr

	// FlowLabel is the flow label of an outer IPv6 header, 20 bits (RFC 6438).
	FlowLabel uint32
	// Own and NextHop are the Ethernet source and destination.
	Own, NextHop MAC
}

// Encapsulate returns the frame that a balancer sends for a client's frame. It decrements the hop
// limit, encapsulates the packet, and sets the Ethernet addresses. It keeps VLAN tags, and bytes of
// the frame after the packet. Encapsulate does not change the frame itself.
func Encapsulate(frame []byte, e Encap) ([]byte, error) {
	network, ip, err := parseFrame(frame)
	if err != nil {
		return nil, err
	}
	if e.FlowLabel > maxFlowLabel {
		return nil, fmt.Errorf("flow label %#x: %w", e.FlowLabel, ErrEncap)
	}
	p := slices.Clone(frame[network:])
	if err := decrementHopLimit(p, ip); err != nil {
		return nil, err
	}
	switch e.Kind {
	case desired.SRv6Insert:
		p, err = e.insert(p, ip)
	case desired.SRv6Encap:
		p, err = e.encapSRv6(p, ip)
	case desired.GRE:
		p, err = e.encapGRE(p, ip)
	case desired.IPIP:
		p, err = e.wrap(p, ip, nil, protocolOf(ip.version), e.Source, e.Destination)
	default:
		err = fmt.Errorf("kind %q: %w", e.Kind, ErrEncap)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", e.Kind, err)
	}
	header := link(frame[:network], int(p[0]>>4))
	return append(SetMACs(header, e.Own, e.NextHop), p...), nil
}

// insert adds a segment routing header to the packet's own chain of headers, after the IPv6 header
// and hop-by-hop options (RFC 8200 section 4.1).
func (e Encap) insert(p []byte, ip ipHeader) ([]byte, error) {
	if ip.version != 6 {
		return nil, fmt.Errorf("inner IPv%d: %w", ip.version, ErrFamily)
	}
	if err := e.checkPath(); err != nil {
		return nil, err
	}
	at, nextHeader, err := skipHopByHop(p[:ip.total])
	if err != nil {
		return nil, err
	}
	// The list begins with the sender's address, which the packet does not visit, and ends with the
	// packet's destination.
	path := append([]netip.Addr{e.Sender}, e.Segments...)
	srh := NewSRH(len(e.Segments), append(path, ip.destination)...)
	srh.NextHeader = layers.IPProtocol(p[nextHeader])
	length := ip.total - ipv6Length + srh.Len()
	if length > maxLength {
		return nil, fmt.Errorf("IPv6 payload of %d bytes: %w", length, ErrTooLong)
	}
	p[nextHeader] = protocolRouting
	binary.BigEndian.PutUint16(p[4:], uint16(length))
	setIPv6Destination(p, e.Segments[0])
	return slices.Insert(p, at, srh.Bytes()...), nil
}

// encapSRv6 encapsulates by H.Encaps.Red (RFC 8986 section 5.2). With Whole, it does so by H.Encaps
// (section 5.1). A reduced list does not have the first segment, which is the outer destination.
// With a single segment, there is no segment routing header.
func (e Encap) encapSRv6(p []byte, ip ipHeader) ([]byte, error) {
	if err := e.checkPath(); err != nil {
		return nil, err
	}
	first, rest := e.Segments[0], e.Segments[1:]
	if len(rest) == 0 {
		return e.wrap(p, ip, nil, protocolOf(ip.version), e.Sender, first)
	}
	list := rest
	if e.Whole {
		list = e.Segments
	}
	srh := NewSRH(len(rest), list...)
	srh.NextHeader = layers.IPProtocol(protocolOf(ip.version))
	return e.wrap(p, ip, srh.Bytes(), protocolRouting, e.Sender, first)
}

// encapGRE adds the header of RFC 2784 section 2, without a checksum.
func (e Encap) encapGRE(p []byte, ip ipHeader) ([]byte, error) {
	protocol := uint16(etherTypeIPv6)
	if ip.version == 4 {
		protocol = etherTypeIPv4
	}
	header := binary.BigEndian.AppendUint16(make([]byte, 2, greLength), protocol)
	return e.wrap(p, ip, header, protocolGRE, e.Source, e.Destination)
}

// wrap puts an outer IP header before the packet p, and a shim between the two. The shim is the
// bytes of a GRE or segment routing header, or empty. protocol is the one that the outer header
// announces. wrap copies the whole traffic class: DSCP by the uniform model of RFC 2983, ECN by the
// normal mode of RFC 6040 section 4.1.
func (e Encap) wrap(p []byte, ip ipHeader, shim []byte, protocol uint8, source, destination netip.Addr,
) ([]byte, error) {
	if !source.IsValid() || !destination.IsValid() || source.Is4() != destination.Is4() {
		return nil, fmt.Errorf("outer addresses %v and %v: %w", source, destination, ErrFamily)
	}
	length := len(shim) + ip.total
	limit := maxLength
	if source.Is4() {
		limit -= ipv4Length // the length field of IPv4 includes the header
	}
	if length > limit {
		return nil, fmt.Errorf("outer payload of %d bytes: %w", length, ErrTooLong)
	}
	outer := outerIPv6(ip.trafficClass, e.FlowLabel, length, protocol, source, destination)
	if source.Is4() {
		outer = outerIPv4(ip.trafficClass, length, protocol, source, destination)
	}
	return slices.Concat(outer, shim, p), nil
}

// checkPath returns an error if Sender and Segments cannot be in a segment routing header.
func (e Encap) checkPath() error {
	if len(e.Segments) == 0 || len(e.Segments)+2 > maxSegments { // 2: see insert
		return fmt.Errorf("%d segments: %w", len(e.Segments), ErrEncap)
	}
	for _, addr := range append([]netip.Addr{e.Sender}, e.Segments...) {
		if !addr.Is6() {
			return fmt.Errorf("segment %v: %w", addr, ErrFamily)
		}
	}
	return nil
}

// outerIPv4 returns an outer IPv4 header, with the don't-fragment bit. So the datagram is atomic
// (RFC 6864 section 4), and its ID, which is 0, has no meaning.
func outerIPv4(tos uint8, payload int, protocol uint8, source, destination netip.Addr) []byte {
	b := []byte{0x45, tos}
	b = binary.BigEndian.AppendUint16(b, uint16(ipv4Length+payload))
	b = binary.BigEndian.AppendUint32(b, dontFragment)
	b = append(b, outerHopLimit, protocol, 0, 0)
	b = append(b, source.AsSlice()...)
	b = append(b, destination.AsSlice()...)
	binary.BigEndian.PutUint16(b[10:], checksum(b))
	return b
}

// outerIPv6 returns an outer IPv6 header.
func outerIPv6(class uint8, flowLabel uint32, payload int, next uint8, source, destination netip.Addr) []byte {
	b := binary.BigEndian.AppendUint32(nil, 6<<28|uint32(class)<<20|flowLabel)
	b = binary.BigEndian.AppendUint16(b, uint16(payload))
	b = append(b, next, outerHopLimit)
	b = append(b, source.AsSlice()...)
	return append(b, destination.AsSlice()...)
}

func setIPv6Destination(p []byte, destination netip.Addr) { copy(p[24:40], destination.AsSlice()) }

// protocolOf returns the protocol number of an encapsulated packet of an IP version.
func protocolOf(version int) uint8 {
	if version == 4 {
		return protocolIPv4
	}
	return protocolIPv6
}
