// SPDX-License-Identifier: Apache-2.0

// Package srv6 names the segment identifiers (SIDs) that balancers and agents exchange.
package srv6

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// LocatorBits is the length of every locator: the prefix that routes to a balancer or a server.
const LocatorBits = 64

// MaxArgument is the largest argument a SID can carry.
const MaxArgument = 1<<48 - 1

// SID is an IPv6 address read as LOC:FUNCT:ARG (RFC 8986 section 3.1).
type SID struct {
	// Locator is the /64 of the host that executes the function.
	Locator netip.Prefix
	// Function is what the host does with the packet.
	Function Function
	// Argument is an argument of the function, at most MaxArgument (48 bits).
	Argument uint64
}

// Parse reads an IPv6 address as a SID. Every IPv6 address can be read like this. Only the locator
// tells the caller whether the address is a SID.
func Parse(addr netip.Addr) SID {
	b := addr.As16()
	return SID{
		Locator:  netip.PrefixFrom(addr.WithZone(""), LocatorBits).Masked(),
		Function: Function(binary.BigEndian.Uint16(b[8:])),
		Argument: binary.BigEndian.Uint64(b[8:]) & MaxArgument,
	}
}

// Addr returns the address of the SID. It ignores the bits of Argument above MaxArgument.
func (s SID) Addr() netip.Addr {
	b := s.Locator.Masked().Addr().As16()
	binary.BigEndian.PutUint64(b[8:], uint64(s.Function)<<48|s.Argument&MaxArgument)
	return netip.AddrFrom16(b)
}

// String returns the locator with the function's short name, as in "fd00:5:0:1::dv" and, with an
// argument, "fd00:5:0:1::cs(0x2a)" or "fd00:5:0:1::ca(column 1, 3 busy of 2)". If the function has
// no name, it returns the address unchanged.
func (s SID) String() string {
	name := s.Function.Short()
	if name == "" {
		return s.Addr().String()
	}
	switch {
	case s.Argument == 0:
	case s.Function.IsOffer():
		name += fmt.Sprintf("(%v)", ParseOffer(s.Argument))
	default:
		name += fmt.Sprintf("(%#x)", s.Argument)
	}
	return s.Locator.Masked().Addr().String() + name
}
