// SPDX-License-Identifier: Apache-2.0

package packet

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// Fragments divides the packet of a frame into fragments with the identification id (RFC 791
// section 3.2, RFC 8200 section 4.5), and returns a frame for each. A fragment has at most size
// bytes of data; size is a multiple of 8. An IPv6 packet that fits becomes one atomic fragment (RFC
// 6946). Extension headers other than hop-by-hop options are part of the data. All fragments have
// the IPv4 options. The don't-fragment bit is cleared.
func Fragments(frame []byte, size int, id uint32) [][]byte {
	network, ip, err := parseFrame(frame)
	must(err)
	if size <= 0 || size%8 != 0 {
		must(fmt.Errorf("fragments of %d bytes: %w", size, ErrHeader))
	}
	p := frame[network : network+ip.total]
	at, nextHeader := ip.length, 0
	if ip.version == 6 {
		at, nextHeader, err = skipHopByHop(p)
		must(err)
	}
	var out [][]byte
	for offset := 0; at+offset < len(p); offset += size {
		end := min(at+offset+size, len(p))
		header := slices.Clone(p[:at])
		if ip.version == 6 {
			header = fragmentIPv6(header, nextHeader, offset, end < len(p), id)
			binary.BigEndian.PutUint16(header[4:], uint16(len(header)-ipv6Length+end-at-offset))
		} else {
			fragmentIPv4(header, offset, end < len(p), uint16(id))
			binary.BigEndian.PutUint16(header[2:], uint16(len(header)+end-at-offset))
			binary.BigEndian.PutUint16(header[10:], 0)
			binary.BigEndian.PutUint16(header[10:], checksum(header))
		}
		out = append(out, slices.Concat(frame[:network], header, p[at+offset:end]))
	}
	return out
}

// fragmentIPv4 turns an IPv4 header into the header of a fragment. offset is the offset of the
// fragment's data, in bytes. more tells that another fragment follows.
func fragmentIPv4(header []byte, offset int, more bool, id uint16) {
	field := uint16(offset / 8)
	if more {
		field |= 0x2000
	}
	binary.BigEndian.PutUint16(header[4:], id)
	binary.BigEndian.PutUint16(header[6:], field)
}

// fragmentIPv6 appends a fragment header to an IPv6 header and its hop-by-hop options. nextHeader
// is the offset of the field that then announces the fragment header. offset, more and id are the
// same as in fragmentIPv4.
func fragmentIPv6(header []byte, nextHeader, offset int, more bool, id uint32) []byte {
	field := uint16(offset) // in units of 8 bytes, above three bits of flags
	if more {
		field |= 1
	}
	fragment := []byte{header[nextHeader], 0}
	fragment = binary.BigEndian.AppendUint16(fragment, field)
	fragment = binary.BigEndian.AppendUint32(fragment, id)
	header[nextHeader] = protocolFragment
	return append(header, fragment...)
}
