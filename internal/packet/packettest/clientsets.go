// SPDX-License-Identifier: Apache-2.0

package packettest

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
)

// ClientSetSize is the number of clients in a set, without the first one.
const ClientSetSize = 511

// client is an address of 128 bits, in two halves, and a port.
type client struct {
	high, low uint64
	port      uint16
}

func (c client) addrPort() netip.AddrPort {
	var address [16]byte
	binary.BigEndian.PutUint64(address[:], c.high)
	binary.BigEndian.PutUint64(address[8:], c.low)
	return netip.AddrPortFrom(netip.AddrFrom16(address), c.port)
}

var (
	some6 = client{0x20010db8_000c0000, 2, 40000}
	some4 = client{0, 0xffff_0a000002, 40000}
)

// changes has a function for each set. It returns client i of the set. Client 0 is some6 or some4,
// and the name of the set says how the others differ from it.
var changes = map[string]func(i uint64) client{
	"top bits of both halves": func(i uint64) client {
		return client{some6.high ^ i>>6<<61, some6.low ^ i<<58, some6.port}
	},
	"top bits of the address": func(i uint64) client { return client{some6.high ^ i<<55, some6.low, some6.port} },
	"bottom bits of both halves": func(i uint64) client {
		return client{some6.high ^ i&15, some6.low ^ i>>4, some6.port}
	},
	"middle bits": func(i uint64) client {
		return client{some6.high ^ i&15<<30, some6.low ^ i>>4<<30, some6.port}
	},
	"single bits, and pairs of bits": func(i uint64) client {
		c := some6
		for _, bit := range []uint64{i % 128, i / 128 * 37 % 128} {
			if bit < 64 {
				c.low ^= 1 << bit
			} else {
				c.high ^= 1 << (bit - 64)
			}
		}
		return c
	},
	"halves whose sum is the same": func(i uint64) client {
		return client{some6.high + i, some6.low - i, some6.port}
	},
	"halves whose sum in the top bits is the same": func(i uint64) client {
		return client{some6.high + i<<55, some6.low - i<<55, some6.port}
	},
	"words whose sum is the same": func(i uint64) client {
		return client{some6.high + i<<32 - i, some6.low, some6.port}
	},
	"words whose top bits change together": func(i uint64) client {
		all := i&127<<25 | i&127<<57
		return client{some6.high ^ all, some6.low ^ all, some6.port + uint16(i>>7)}
	},
	"address and port together": func(i uint64) client {
		return client{some6.high, some6.low + i, some6.port - uint16(i)}
	},
	"ports":                   func(i uint64) client { return client{some6.high, some6.low, some6.port + uint16(i)} },
	"ports by 128":            func(i uint64) client { return client{some6.high, some6.low, some6.port + uint16(i)<<7} },
	"subnets of one site":     func(i uint64) client { return client{some6.high + i, some6.low, some6.port} },
	"sites of one provider":   func(i uint64) client { return client{some6.high + i<<16, some6.low, some6.port} },
	"IPv4 hosts":              func(i uint64) client { return client{0, some4.low + i, some4.port} },
	"IPv4 networks":           func(i uint64) client { return client{0, some4.low + i<<8, some4.port} },
	"IPv4 top bits":           func(i uint64) client { return client{0, some4.low ^ i<<23, some4.port} },
	"IPv4 address and port":   func(i uint64) client { return client{0, some4.low + i&31, some4.port + uint16(i>>5)} },
	"IPv4 single bits, ports": func(i uint64) client { return client{0, some4.low ^ 1<<(i&31), some4.port ^ uint16(i>>5)} },
}

// ClientSets yields sets of different clients, by name. The addresses and ports of a set follow a
// pattern. An attacker could use such sets, because a weak hash collides for them.
func ClientSets() iter.Seq2[string, []netip.AddrPort] {
	return func(yield func(string, []netip.AddrPort) bool) {
		for name, change := range changes {
			if !yield(name, set(change)) {
				return
			}
		}
		for word := range uint64(4) { // of 32 bits in the address
			for end, shift := range map[string]uint64{"top": 23, "bottom": 0} {
				change := func(i uint64) client { // i has 9 bits
					c := some6
					half := &c.high
					if word >= 2 {
						half = &c.low
					}
					*half ^= i << shift << (32 * (1 - word%2))
					return c
				}
				if !yield(fmt.Sprintf("%s bits of word %d", end, word), set(change)) {
					return
				}
			}
		}
	}
}

// set returns the clients of a change, without repetitions. The first one is the victim of an
// attack.
func set(change func(i uint64) client) (clients []netip.AddrPort) {
	seen := map[netip.AddrPort]bool{}
	for i := uint64(0); len(clients) <= ClientSetSize; i++ {
		if at := change(i).addrPort(); !seen[at] {
			seen[at] = true
			clients = append(clients, at)
		}
	}
	return clients
}
