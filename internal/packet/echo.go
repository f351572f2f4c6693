// SPDX-License-Identifier: Apache-2.0

package packet

import "slices"

// EchoReply is what the addressee of a ping sends back, to where the frame came from, with a hop limit
// of its own. The checksums are updated, not computed anew, so that wrong ones stay wrong. The frame
// must have an echo request right behind its IP header.
func EchoReply(frame []byte, limit uint8) []byte {
	network, ip, err := parseFrame(frame)
	must(err)
	out := slices.Clone(frame)
	copy(out, SetMACs(frame, MAC(frame), MAC(frame[6:])))
	p := out[network:]
	setHopLimit(p, ip.version, limit)
	addresses, size, reply := 12, 4, uint8(0)
	if ip.version == 6 {
		addresses, size, reply = 8, 16, 129
	}
	copy(p[addresses:], ip.destination.AsSlice())
	copy(p[addresses+size:], ip.source.AsSlice())
	setICMPType(p[ip.length:], reply)
	return out
}
