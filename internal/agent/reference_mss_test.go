// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/packet"
)

// transmit returns the result under which a frame that the host sends is counted, and the frame
// that is sent. The result is "" if the frame is not a SYN-ACK of a service.
func (r reference) transmit(frame []byte) (result string, out []byte) {
	source, tcp := findTCP(frame)
	if len(tcp) < 20 || packet.TCPFlags(tcp[13])&(packet.SYN|packet.ACK) != packet.SYN|packet.ACK {
		return "", frame
	}
	largest := r.largest[netip.AddrPortFrom(source, binary.BigEndian.Uint16(tcp))]
	if largest == 0 {
		largest = r.largest[netip.AddrPortFrom(source, 0)]
	}
	if largest == 0 {
		return "", frame
	}
	result, at := findMSS(tcp)
	if result != "fits" || binary.BigEndian.Uint16(tcp[at:]) <= largest {
		return result, frame
	}
	out = slices.Clone(frame)
	setWord(out[len(frame)-len(tcp):], at, largest)
	return "clamped", out
}

// findTCP returns the source of a packet, and its bytes from the TCP header on. It returns nothing
// if the TCP header does not follow the IP header directly.
func findTCP(frame []byte) (source netip.Addr, tcp []byte) {
	b := frame[14:]
	switch binary.BigEndian.Uint16(frame[12:]) {
	case 0x0800:
		header := int(b[0]&0xf) * 4
		laterFragment := binary.BigEndian.Uint16(b[6:])&0x1fff != 0
		if b[0]>>4 != 4 || header < 20 || header > len(b) || b[9] != 6 || laterFragment {
			return source, nil
		}
		return netip.AddrFrom4([4]byte(b[12:])), b[header:]
	case 0x86dd:
		if b[0]>>4 != 6 || b[6] != 6 {
			return source, nil
		}
		return netip.AddrFrom16([16]byte(b[8:])), b[40:]
	}
	return source, nil
}

// findMSS returns the offset of the option's value. A header in which neither the option nor the
// end is found after twenty options counts as malformed, too.
func findMSS(tcp []byte) (result string, at int) {
	at, end := 20, int(tcp[12]>>4)*4
	for range 20 {
		switch {
		case at >= end:
			return "no_option", 0
		case at >= len(tcp):
			return "malformed", 0
		case tcp[at] == 0:
			return "no_option", 0
		case tcp[at] == 1:
			at++
			continue
		case at+1 >= len(tcp) || tcp[at+1] < 2 || at+int(tcp[at+1]) > end:
			return "malformed", 0
		case tcp[at] == 2 && (tcp[at+1] != 4 || at+4 > len(tcp)):
			return "malformed", 0
		case tcp[at] == 2:
			return "fits", at + 2
		}
		at += int(tcp[at+1])
	}
	return "malformed", 0
}

// setWord changes 16 bits of a TCP header, and updates the checksum by RFC 1624 equation 3. The
// checksum is over 16-bit words. If the value begins at an odd offset, its bytes are in two words.
func setWord(tcp []byte, at int, value uint16) {
	before, after := binary.BigEndian.Uint16(tcp[at:]), value
	if at%2 == 1 {
		before, after = bits.ReverseBytes16(before), bits.ReverseBytes16(after)
	}
	sum := uint32(^binary.BigEndian.Uint16(tcp[16:])) + uint32(^before) + uint32(after)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	binary.BigEndian.PutUint16(tcp[at:], value)
}
