// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
)

const (
	protocolUDP = 17
	udpLength   = 8 // of a UDP header, in bytes
)

// Underlay has the fields of an IPv4 and a UDP header around an IPv6 packet (GUE variant 1).
type Underlay struct {
	Source, Destination netip.Addr // IPv4
	SourcePort, Port    uint16
}

// Wrap returns a frame with the underlay around its IPv6 packet. The outer header has the packet's
// traffic class. Wrap keeps the Ethernet addresses, and does not change the frame itself.
func (u Underlay) Wrap(frame []byte) ([]byte, error) {
	network, ip, err := parseFrame(frame)
	if err != nil {
		return nil, err
	}
	if ip.version != 6 || !u.Source.Is4() || !u.Destination.Is4() {
		return nil, fmt.Errorf("IPv%d from %v to %v: %w", ip.version, u.Source, u.Destination, ErrFamily)
	}
	length := uint16(udpLength + ip.total)
	udp := binary.BigEndian.AppendUint16(nil, u.SourcePort)
	udp = binary.BigEndian.AppendUint16(udp, u.Port)
	udp = binary.BigEndian.AppendUint16(udp, length)
	udp = append(udp, 0, 0) // no checksum: RFC 768
	outer := outerIPv4(ip.trafficClass, int(length), protocolUDP, u.Source, u.Destination)
	return slices.Concat(link(frame[:network], 4), outer, udp, frame[network:]), nil
}
