// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"encoding/binary"
	"iter"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// dump asks the kernel for all objects of one kind, and calls f with each message of the answer.
// Every message begins with a header of a certain size, whose first byte is the address family.
// Family AF_UNSPEC asks for all families. The error is netlink.ErrDumpInterrupted if objects have
// changed during the dump, where the kernel notices that.
func dump(request, answer uint16, family byte, size int, f func(message []byte)) error {
	header := make([]byte, size)
	header[0] = family
	r := nl.NewNetlinkRequest(int(request), unix.NLM_F_DUMP)
	r.AddRawData(header)
	return r.ExecuteIter(unix.NETLINK_ROUTE, answer, func(message []byte) bool {
		// A kernel that lacks the family answers for all others.
		if len(message) >= size && (message[0] == family || family == unix.AF_UNSPEC) {
			f(message)
		}
		return true
	})
}

// typeMask takes the flags from the type of an attribute (NLA_TYPE_MASK).
const typeMask = 0x3fff

// attributes are the types and values of netlink attributes (struct nlattr). They end before the
// first one that is cut off.
func attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			length := int(binary.NativeEndian.Uint16(b))
			if length < unix.SizeofNlAttr || length > len(b) {
				return
			}
			kind := binary.NativeEndian.Uint16(b[2:]) & typeMask
			if !yield(kind, b[unix.SizeofNlAttr:length]) {
				return
			}
			b = b[min(aligned(length), len(b)):]
		}
	}
}

// aligned is a length of netlink with its padding (NLA_ALIGN, RTNH_ALIGN).
func aligned(length int) int { return (length + 3) &^ 3 }

// number is the value of an attribute of 32 bits.
func number(value []byte) uint32 {
	if len(value) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}

// addressOf is the value of an attribute that holds an IPv4 or IPv6 address.
func addressOf(value []byte) netip.Addr {
	address, _ := netip.AddrFromSlice(value)
	return address.Unmap()
}

// familyOf is the kernel's number of an address's family.
func familyOf(address netip.Addr) byte {
	if address.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
