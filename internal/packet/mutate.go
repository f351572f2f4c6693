// SPDX-License-Identifier: Apache-2.0

package packet

import "slices"

// SetHopLimit returns a copy of the frame with another hop limit. For IPv4, it updates the
// checksum.
func SetHopLimit(frame []byte, limit uint8) []byte {
	network, ip, err := parseFrame(frame)
	must(err)
	out := slices.Clone(frame)
	setHopLimit(out[network:], ip.version, limit)
	return out
}

// SetMACs returns a copy of the frame with other Ethernet addresses.
func SetMACs(frame []byte, src, dst MAC) []byte { return slices.Concat(dst[:], src[:], frame[12:]) }

// SetByte returns a copy of the frame with another value at an offset. It does not change
// checksums.
func SetByte(frame []byte, offset int, value byte) []byte {
	out := slices.Clone(frame)
	out[offset] = value
	return out
}

// FlipByte returns a copy of the frame with all bits of a byte inverted.
func FlipByte(frame []byte, offset int) []byte { return SetByte(frame, offset, ^frame[offset]) }

// Truncate returns a copy of the frame's first length bytes.
func Truncate(frame []byte, length int) []byte { return slices.Clone(frame[:length]) }

// Pad returns a copy of the frame with bytes after its packet, as short frames have on a wire.
func Pad(frame []byte, trailer ...byte) []byte { return slices.Concat(frame, trailer) }

// NetworkOffset returns the offset of a frame's IP header.
func NetworkOffset(frame []byte) int {
	at, err := networkOffset(frame)
	must(err)
	return at
}

// TransportOffset returns the offset of the first byte after the IP header and its extension
// headers, for example of TCP or of the inner packet of a tunnel. In a fragment other than the
// first, the byte is in the middle of the original packet.
func TransportOffset(frame []byte) int {
	network, ip, err := parseFrame(frame)
	must(err)
	if ip.version == 4 {
		return network + ip.length
	}
	p := frame[network : network+ip.total]
	at, protocol := ipv6Length, ip.protocol
	for isExtension(protocol) {
		length, err := extensionLength(p[at:])
		if protocol == protocolFragment {
			length = extensionUnit // a fragment header has no length field
		}
		must(err)
		at, protocol = at+length, p[at]
	}
	return network + at
}

// isExtension tells whether a protocol number is that of an IPv6 extension header.
func isExtension(protocol uint8) bool {
	switch protocol {
	case protocolHopByHop, protocolDestination, protocolRouting, protocolFragment:
		return true
	}
	return false
}
