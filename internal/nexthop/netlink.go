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
// request and answer are the types of the messages, RTM_*. Every message begins with a header of
// size bytes, and the first byte of the header is the address family. The family AF_UNSPEC asks for
// all families. The error is netlink.ErrDumpInterrupted if the kernel noticed that objects changed
// during the dump.
func dump(request, answer uint16, family byte, size int, f func(message []byte)) error {
	header := make([]byte, size)
	header[0] = family
	r := nl.NewNetlinkRequest(int(request), unix.NLM_F_DUMP)
	r.AddRawData(header)
	return r.ExecuteIter(unix.NETLINK_ROUTE, answer, func(message []byte) bool {
		// A kernel that does not know the family answers with the objects of all other families.
		if len(message) >= size && (message[0] == family || family == unix.AF_UNSPEC) {
			f(message)
		}
		return true
	})
}

// typeMask removes the flags from the type of an attribute (NLA_TYPE_MASK).
const typeMask = 0x3fff

// attributes returns the types and values of netlink attributes (struct nlattr), up to the first
// truncated one.
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

// aligned returns the length of a netlink attribute or next hop with its padding (NLA_ALIGN,
// RTNH_ALIGN).
func aligned(length int) int { return (length + 3) &^ 3 }

// number returns the value of a 32-bit attribute or field, or 0 if it is too short.
func number(value []byte) uint32 {
	if len(value) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}

// addressOf returns the value of an attribute with an IPv4 or IPv6 address. If the value has
// another length, the address is invalid.
func addressOf(value []byte) netip.Addr {
	address, _ := netip.AddrFromSlice(value)
	return address.Unmap()
}

// familyOf returns the kernel's number of an address's family.
func familyOf(address netip.Addr) byte {
	if address.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
