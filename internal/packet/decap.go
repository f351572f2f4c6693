// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

// envelope describes the outer headers of a frame. All offsets but network are from the start of
// the outer IP packet.
type envelope struct {
	network    int // offset of the outer IP header in the frame
	ip         ipHeader
	srh        *SRH  // the segment routing header; nil: none
	srhAt      int   // offset of the segment routing header
	srhNamedBy int   // offset of the next header field that announces the segment routing header
	content    int   // offset of the first byte after the outer headers
	protocol   uint8 // protocol of the content
}

// open reads the outer headers of a frame: IP, hop-by-hop options and a segment routing header.
func open(frame []byte) (envelope, error) {
	network, ip, err := parseFrame(frame)
	if err != nil {
		return envelope{}, err
	}
	env := envelope{network: network, ip: ip, content: ip.length, protocol: ip.protocol}
	if ip.version == 4 {
		return env, nil
	}
	p := frame[network : network+ip.total]
	at, nextHeader, err := skipHopByHop(p)
	if err != nil {
		return envelope{}, err
	}
	env.content, env.protocol = at, p[nextHeader]
	if env.protocol != protocolRouting {
		return env, nil
	}
	env.srh, err = parseSRH(p[at:])
	if err != nil {
		return envelope{}, err
	}
	env.srhAt, env.srhNamedBy = at, nextHeader
	env.content, env.protocol = at+env.srh.Len(), uint8(env.srh.NextHeader)
	return env, nil
}

// inner returns the IP header of a tunnel's inner packet, and its offset in the outer packet. It is
// only for a tunnel: an inserted segment routing header has no inner packet.
func (env envelope) inner(frame []byte) (ip ipHeader, at int, err error) {
	if env.ip.fragment {
		return ipHeader{}, 0, fmt.Errorf("outer IPv4: %w", ErrFragment)
	}
	p := frame[env.network : env.network+env.ip.total]
	at, version := env.content, 6
	switch env.protocol {
	case protocolIPv6:
	case protocolIPv4:
		version = 4
	case protocolGRE:
		at += greLength
		if len(p) < at {
			return ipHeader{}, 0, fmt.Errorf("%d bytes of a GRE header: %w", len(p)-env.content, ErrTruncated)
		}
		// The flags and the version must be 0. Then the header, as a number, is its protocol.
		switch header := binary.BigEndian.Uint32(p[env.content:]); header {
		case etherTypeIPv6:
		case etherTypeIPv4:
			version = 4
		default:
			return ipHeader{}, 0, fmt.Errorf("GRE header %#08x: %w", header, ErrGRE)
		}
	}
	ip, err = parseIP(p[at:], version)
	return ip, at, err
}

// tunnel tells whether a whole packet follows the outer headers. If GRE follows a segment routing
// header, it is the client's own: the header was inserted before it.
func (env envelope) tunnel() bool {
	return env.protocol == protocolIPv4 || env.protocol == protocolIPv6 || env.protocol == protocolGRE && env.srh == nil
}

// vip returns the destination address to which the client sent the packet.
func (env envelope) vip(frame []byte) (netip.Addr, error) {
	if env.tunnel() {
		ip, _, err := env.inner(frame)
		return ip.destination, err
	}
	if env.srh == nil {
		return netip.Addr{}, fmt.Errorf("protocol %d: %w", env.protocol, ErrNotEncapsulated)
	}
	if env.srh.SegmentsLeft == 0 {
		return netip.Addr{}, fmt.Errorf("no segment left, so no VIP: %w", ErrSegments)
	}
	return env.srh.Segments[0], nil
}

// Decapsulate returns a frame with the packet that an agent delivers: the client's packet with the
// hop limit that the balancer gave it, and with the congestion marks of the path (RFC 6040).
// Decapsulate finds the encapsulation by the headers. It keeps Ethernet addresses, VLAN tags and
// the bytes after the packet. It does not change the frame itself.
func Decapsulate(frame []byte) ([]byte, error) {
	env, err := open(frame)
	if err != nil {
		return nil, err
	}
	if env.tunnel() {
		return env.decapsulate(frame)
	}
	return env.removeSRH(frame)
}

// removeSRH removes an inserted segment routing header.
func (env envelope) removeSRH(frame []byte) ([]byte, error) {
	vip, err := env.vip(frame)
	if err != nil {
		return nil, err
	}
	out := slices.Clone(frame)
	p := out[env.network:]
	setIPv6Destination(p, vip)
	p[env.srhNamedBy] = env.protocol
	binary.BigEndian.PutUint16(p[4:], uint16(env.ip.total-ipv6Length-env.srh.Len()))
	return slices.Delete(out, env.network+env.srhAt, env.network+env.content), nil
}

// decapsulate removes the outer headers of a tunnel.
func (env envelope) decapsulate(frame []byte) ([]byte, error) {
	ip, at, err := env.inner(frame)
	if err != nil {
		return nil, fmt.Errorf("inner packet: %w", err)
	}
	mark, err := combineECN(ip.trafficClass&ecnMask, env.ip.trafficClass&ecnMask)
	if err != nil {
		return nil, err
	}
	p := slices.Clone(frame[env.network+at:])
	// An unchanged mark must not be written: an update could turn an IPv4 checksum of 0x0000 into
	// its other form, 0xffff.
	if mark != ip.trafficClass&ecnMask {
		setECN(p, ip.version, mark)
	}
	return append(link(frame[:env.network], ip.version), p...), nil
}

// Advance returns the frame that a server passes on to the next segment (RFC 8754 section 4.3.1.1).
// It decrements segments left, makes the next segment the destination, and decrements the hop
// limit. It keeps the Ethernet addresses, because the kernel sets them when it forwards the frame.
// Advance does not change the frame itself.
func Advance(frame []byte) ([]byte, error) {
	env, err := open(frame)
	if err != nil {
		return nil, err
	}
	if env.srh == nil || env.srh.SegmentsLeft == 0 {
		return nil, fmt.Errorf("no segment left: %w", ErrSegments)
	}
	out := slices.Clone(frame)
	p := out[env.network:]
	if err := decrementHopLimit(p, env.ip); err != nil {
		return nil, err
	}
	left := env.srh.SegmentsLeft - 1
	p[env.srhAt+3] = left // the field segments left
	setIPv6Destination(p, env.srh.Segments[left])
	return out, nil
}
