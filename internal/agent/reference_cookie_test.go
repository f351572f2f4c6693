// SPDX-License-Identifier: Apache-2.0

package agent

import "encoding/binary"

// findTimestamps returns the offset of the timestamps in a TCP header; 0: there are none. Options
// behind a malformed one do not count.
func findTimestamps(tcp []byte) int {
	at, end := 20, min(int(tcp[12]>>4)*4, len(tcp))
	for at < end && tcp[at] != 0 {
		if tcp[at] == 1 {
			at++
			continue
		}
		if at+1 >= end || tcp[at+1] < 2 || at+int(tcp[at+1]) > end {
			return 0
		}
		if tcp[at] == 8 {
			if tcp[at+1] != 10 {
				return 0
			}
			return at + 2
		}
		at += int(tcp[at+1])
	}
	return 0
}

// setTimestamp changes 32 bits of a TCP header, and updates the checksum.
func setTimestamp(tcp []byte, at int, value uint32) {
	setWord(tcp, at, uint16(value>>16))
	setWord(tcp, at+2, uint16(value))
}

// timestampAt returns 32 bits of a TCP header.
func timestampAt(tcp []byte, at int) uint32 { return binary.BigEndian.Uint32(tcp[at:]) }
