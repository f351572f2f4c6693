// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
)

// ethernetLength is the length of an Ethernet header without VLAN tags, in bytes.
const ethernetLength = 14

// MaxFrame is the length of the longest frame that Mutate makes, in bytes. BPF_PROG_TEST_RUN
// requires that a frame fits into a page, with 256 bytes before it and a trailer of the kernel.
const MaxFrame = 2048

// Mutate returns a frame with one to four changes. A change flips a bit, sets a byte or a length
// field, cuts or extends the end, inserts a header, deletes some bytes, or takes over a part of one
// of the other frames. A change of the frame's length often corrects the length in the IP header,
// so that mutants pass the first check. Mutate does not change the frame itself. The result has at
// least an Ethernet header.
func Mutate(random *rand.Rand, frame []byte, others [][]byte) []byte {
	m := mutant{random, slices.Clone(frame)}
	for range 1 + random.IntN(4) {
		switch random.IntN(10) {
		case 0:
			m.flipBit()
		case 1, 2:
			m.setByte()
		case 3:
			m.setLength()
		case 4:
			m.cut()
		case 5:
			m.extend()
		case 6:
			m.insertHeader()
		case 7:
			m.delete()
		case 8:
			m.splice(others[random.IntN(len(others))])
		case 9:
			m.nest(others[random.IntN(len(others))])
		}
		m.frame = fit(m.frame)
	}
	return m.frame
}

// fit turns any bytes into a frame of a valid length: it pads or cuts them.
func fit(b []byte) []byte {
	if missing := ethernetLength - len(b); missing > 0 {
		return append(b, make([]byte, missing)...)
	}
	return b[:min(len(b), MaxFrame)]
}

// mutant is a frame that is being changed.
type mutant struct {
	*rand.Rand
	frame []byte
}

// at returns a random offset in the frame, mostly within 100 bytes after the Ethernet header, and
// rarely in the Ethernet header. If the frame has only an Ethernet header, at may return the
// frame's end.
func (m *mutant) at() int {
	from, to := ethernetLength, len(m.frame)
	switch m.IntN(30) {
	case 0:
		from = 0
	case 1, 2, 3:
	default:
		to = min(to, ethernetLength+100)
	}
	if to <= from {
		return len(m.frame)
	}
	return from + m.IntN(to-from)
}

// flipBit inverts a bit.
func (m *mutant) flipBit() {
	if at := m.at(); at < len(m.frame) {
		m.frame[at] ^= 1 << m.IntN(8)
	}
}

// telling are values of bytes that have a meaning in some header: protocol numbers, lengths,
// versions.
var telling = []byte{
	0, 1, 2, 3, 4, 5, 6, 7, 8, 17, 20, 40, 41, 43, 44, 47, 50, 51, 58, 59, 60, 0x40, 0x44, 0x45, 0x46, 0x4f, 0x50,
	0x60, 0x65, 0x7f, 0x80, 0x86, 0xdd, 0xf0, 0xff,
}

// setByte adds a small number to a byte, or gives it a telling value.
func (m *mutant) setByte() {
	at := m.at()
	switch {
	case at == len(m.frame):
	case m.IntN(3) == 0:
		m.frame[at] += byte(m.IntN(9) - 4)
	default:
		m.frame[at] = telling[m.IntN(len(telling))]
	}
}

// Offsets of length fields and similar fields from the start of an IP header, values for them, and
// numbers of extension headers.
var (
	ipv4Lengths      = []int{0, 2, 6, 20 + 4, 20 + 12}
	ipv6Lengths      = []int{4, 6, 40, 41, 43, 44, 48, 49, 40 + 4, 40 + 12}
	lengths          = []uint16{0, 1, 4, 5, 7, 8, 19, 20, 21, 27, 28, 39, 40, 41, 47, 48, 55, 56, 59, 60, 1500, 0x7fff, 0x8000, 0xfffe, 0xffff}
	extensionHeaders = []byte{0, 43, 44, 60}
)

// setLength changes a field that tells the length or the end of something.
func (m *mutant) setLength() {
	offsets := ipv6Lengths
	if !m.isIPv6() {
		offsets = ipv4Lengths
	}
	at := ethernetLength + offsets[m.IntN(len(offsets))]
	if at+2 > len(m.frame) {
		return
	}
	switch m.IntN(4) {
	case 0:
		binary.BigEndian.PutUint16(m.frame[at:], lengths[m.IntN(len(lengths))])
	case 1:
		m.fixLength(m.IntN(5) - 2)
	case 2:
		m.frame[at] += byte(m.IntN(5) - 2)
	case 3:
		value := binary.BigEndian.Uint16(m.frame[at:])
		binary.BigEndian.PutUint16(m.frame[at:], value+uint16(m.IntN(9)-4))
	}
}

func (m *mutant) isIPv6() bool { return m.frame[12] == 0x86 }

// fixLength sets the length in the IP header to that of the rest of the frame, plus a surplus.
func (m *mutant) fixLength(surplus int) {
	length := len(m.frame) - ethernetLength + surplus
	switch {
	case m.isIPv6() && len(m.frame) >= ethernetLength+40:
		binary.BigEndian.PutUint16(m.frame[ethernetLength+4:], uint16(length-40))
	case !m.isIPv6() && len(m.frame) >= ethernetLength+20:
		binary.BigEndian.PutUint16(m.frame[ethernetLength+2:], uint16(length))
	}
}

// perhapsFixLength corrects the length in the IP header in three of four cases. It is called after
// the frame's length has changed.
func (m *mutant) perhapsFixLength() {
	if m.IntN(4) > 0 {
		m.fixLength(0)
	}
}

// cut removes the end of the frame.
func (m *mutant) cut() {
	m.frame = fit(m.frame[:m.at()])
	m.perhapsFixLength()
}

// extend appends random bytes.
func (m *mutant) extend() {
	n := 1 + m.IntN(40)
	if m.IntN(8) == 0 {
		n = m.IntN(MaxFrame)
	}
	for range n {
		m.frame = append(m.frame, byte(m.Uint32()))
	}
	if m.IntN(2) == 0 {
		m.fixLength(0)
	}
}

// insertHeader inserts an extension header after the IPv6 header, or options after the IPv4 header.
func (m *mutant) insertHeader() {
	if !m.isIPv6() {
		m.insertOptions()
		return
	}
	nextHeader, at := ethernetLength+6, ethernetLength+40
	if len(m.frame) < at+8 {
		return
	}
	// Mostly insert after hop-by-hop options, which must come first.
	if end := at + 8 + int(m.frame[at+1])*8; m.frame[nextHeader] == 0 && end < len(m.frame) && m.IntN(4) > 0 {
		nextHeader, at = at, end
	}
	kind := extensionHeaders[m.IntN(len(extensionHeaders))]
	size := 8 * (1 + m.IntN(5))
	header := make([]byte, size)
	header[0], header[1] = m.frame[nextHeader], byte(size/8-1)
	switch kind {
	case 43: // segment routing: type 4, segments left, last entry
		header[2], header[3], header[4] = 4, byte(max(0, m.IntN(4)-2)), byte(m.IntN(3))
	case 44: // fragment: a reserved byte, then the offset with the flag that more follow
		header, header[1] = header[:8], byte(m.IntN(2))
		binary.BigEndian.PutUint16(header[2:], []uint16{0, 0, 0, 1, 2, 6, 8, 0xfff8}[m.IntN(8)])
	default:
		header[2], header[3] = 1, byte(size-4) // PadN
	}
	m.frame[nextHeader] = kind
	m.frame = slices.Insert(m.frame, at, header...)
	m.perhapsFixLength()
}

// insertOptions inserts IPv4 options.
func (m *mutant) insertOptions() {
	at := ethernetLength + 20
	if len(m.frame) < at {
		return
	}
	words := 1 + m.IntN(10)
	m.frame = slices.Insert(m.frame, at, slices.Repeat([]byte{1}, 4*words)...) // no operation
	m.frame[ethernetLength] += byte(words)
	m.perhapsFixLength()
}

// delete removes some bytes from the middle. Most of the lengths are those of headers.
func (m *mutant) delete() {
	at := m.at()
	n := []int{1, 2, 4, 8, 16, 20, 24, 40, 56}[m.IntN(9)]
	m.frame = slices.Delete(m.frame, at, min(at+n, len(m.frame)))
	m.frame = fit(m.frame)
	m.perhapsFixLength()
}

// splice replaces the end of this frame by the end of another. Mostly, both ends begin at the same
// offset.
func (m *mutant) splice(other []byte) {
	at := m.at()
	from := min(at, len(other))
	if m.IntN(3) == 0 {
		from = m.IntN(len(other) + 1)
	}
	m.frame = append(m.frame[:at], other[from:]...)
	m.frame = fit(m.frame)
	m.perhapsFixLength()
}

// nest replaces the frame, from the end of one of its headers, by another frame's packet.
func (m *mutant) nest(other []byte) {
	if len(other) < ethernetLength {
		return
	}
	at := min(ethernetLength+[]int{0, 20, 24, 40, 44, 48, 64, 96}[m.IntN(8)], len(m.frame))
	m.frame = append(m.frame[:at], other[ethernetLength:]...)
	m.perhapsFixLength()
}

// Mutants returns the frame, padded or cut to a valid length. Unless the seed is 0, it also returns
// n more frames. The result depends only on the arguments. About half of these n come from the
// frame itself, so that they meet the state that the frame has left in a data path. The rest come
// from the other frames. Seven of eight are mutants, and one of eight is unchanged.
func Mutants(frame []byte, seed uint64, n int, others [][]byte) [][]byte {
	frame = fit(slices.Clone(frame))
	frames := [][]byte{frame}
	if seed == 0 {
		return frames
	}
	random := rand.New(rand.NewPCG(seed, 0))
	for range n {
		origin := frame
		if random.IntN(2) == 0 {
			origin = others[random.IntN(len(others))]
		}
		if random.IntN(8) > 0 {
			origin = Mutate(random, origin, others)
		}
		frames = append(frames, origin)
	}
	return frames
}
