// SPDX-License-Identifier: Apache-2.0

package packet

// The first octets of QUIC packets, with the fixed bit: of a short header (RFC 9000 section 17.3.1),
// and of an Initial packet of version 1 (section 17.2.2).
const (
	quicShortHeader = 0x40
	quicInitial     = 0xc0
)

// QUICHeader returns the beginning of a QUIC packet with a destination connection ID: a short header
// or, if the packet is an Initial of version 1, a long header up to the empty source ID.
func QUICHeader(isInitial bool, id []byte) []byte {
	if !isInitial {
		return append([]byte{quicShortHeader}, id...)
	}
	header := append([]byte{quicInitial, 0, 0, 0, 1, byte(len(id))}, id...)
	return append(header, 0)
}
