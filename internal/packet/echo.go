// SPDX-License-Identifier: Apache-2.0

package packet

import "slices"

// EchoReply returns the frame with the reply to an echo request. It goes back to the frame's
// source, and limit is its hop limit. EchoReply updates the checksums instead of computing them, so
// that wrong checksums stay wrong. In the frame, the echo request must follow the IP header
// directly.
func EchoReply(frame []byte, limit uint8) []byte {
	network, ip, err := parseFrame(frame)
	must(err)
	out := slices.Clone(frame)
	copy(out, SetMACs(frame, MAC(frame), MAC(frame[6:])))
	p := out[network:]
	setHopLimit(p, ip.version, limit)
	// The offset and the size of the addresses, and the type of an echo reply.
	addresses, size, reply := 12, 4, uint8(0)
	if ip.version == 6 {
		addresses, size, reply = 8, 16, 129
	}
	copy(p[addresses:], ip.destination.AsSlice())
	copy(p[addresses+size:], ip.source.AsSlice())
	setICMPType(p[ip.length:], reply)
	return out
}
