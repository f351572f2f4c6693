// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"net"
)

// MAC is an Ethernet address.
type MAC [6]byte

func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

const (
	etherTypeIPv4 = 0x0800
	etherTypeIPv6 = 0x86DD
	etherTypeVLAN = 0x8100 // IEEE 802.1Q
	etherTypeQinQ = 0x88A8 // IEEE 802.1ad

	ethernetLength = 14
	vlanTagLength  = 4
	maxVLANTags    = 2
)

// networkOffset returns the offset of the header after the Ethernet header and its VLAN tags.
func networkOffset(frame []byte) (int, error) {
	at := ethernetLength
	for tags := 0; ; tags++ {
		if len(frame) < at {
			return 0, fmt.Errorf("ethernet header of %d bytes in a frame of %d: %w", at, len(frame), ErrTruncated)
		}
		etherType := etherTypeBefore(frame, at)
		if etherType != etherTypeVLAN && etherType != etherTypeQinQ {
			return at, nil
		}
		if tags == maxVLANTags {
			return 0, fmt.Errorf("more than %d VLAN tags: %w", maxVLANTags, ErrNotIP)
		}
		at += vlanTagLength
	}
}

// etherTypeBefore returns the EtherType of the header that starts at network.
func etherTypeBefore(frame []byte, network int) uint16 {
	return binary.BigEndian.Uint16(frame[network-2:])
}

// link returns an Ethernet header, with its VLAN tags, but with the EtherType of an IP version.
func link(header []byte, version int) []byte {
	etherType := uint16(etherTypeIPv6)
	if version == 4 {
		etherType = etherTypeIPv4
	}
	out := append([]byte(nil), header[:len(header)-2]...)
	return binary.BigEndian.AppendUint16(out, etherType)
}
