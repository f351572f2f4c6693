// SPDX-License-Identifier: Apache-2.0

package packet

import "fmt"

// Congestion marks: the low two bits of the traffic class (RFC 3168 section 5).
const (
	notECT  = 0
	ect1    = 1
	ect0    = 2
	ce      = 3
	ecnMask = 3
)

// combineECN returns the mark of a decapsulated packet by the marks of its inner and outer header
// (RFC 6040 section 4.2, figure 4).
func combineECN(inner, outer uint8) (uint8, error) {
	switch {
	case outer == ce && inner == notECT:
		return 0, fmt.Errorf("outer CE, inner Not-ECT: %w", ErrCongestion)
	case outer == ce:
		return ce, nil
	case outer == ect1 && inner == ect0:
		return ect1, nil
	}
	return inner, nil
}

// setECN sets the mark of an IP packet.
func setECN(p []byte, version int, mark uint8) {
	if version == 6 {
		p[1] = p[1]&^(ecnMask<<4) | mark<<4
		return
	}
	setIPv4Byte(p, 1, p[1]&^ecnMask|mark)
}
