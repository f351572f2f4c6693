// SPDX-License-Identifier: Apache-2.0

package packet

import "errors"

// Why a packet is not forwarded, encapsulated or delivered. Errors of this package wrap one of these.
var (
	// ErrTruncated is a header or a length that reaches beyond the end of its packet.
	ErrTruncated = errors.New("packet is truncated")
	// ErrNotIP is a frame whose EtherType or version is neither IPv4 nor IPv6.
	ErrNotIP = errors.New("not an IP packet")
	// ErrHeader is an IP header that contradicts itself.
	ErrHeader = errors.New("bad IP header")
	// ErrHopLimit is a hop limit or TTL that ends here.
	ErrHopLimit = errors.New("hop limit exceeded")
	// ErrFamily is an encapsulation that cannot carry, or be carried by, an IP version.
	ErrFamily = errors.New("wrong IP version")
	// ErrEncap is an Encap that says nothing sensible.
	ErrEncap = errors.New("bad encapsulation")
	// ErrTooLong is a packet whose length, once encapsulated, no longer fits its header.
	ErrTooLong = errors.New("packet is too long")

	// ErrNotEncapsulated is a packet to a SID or a tunnel's end that carries nothing to deliver.
	ErrNotEncapsulated = errors.New("not encapsulated")
	// ErrFunction is a SID whose function the node does not have.
	ErrFunction = errors.New("unknown function")
	// ErrSegments is a segment routing header whose segments left or last entry is impossible.
	ErrSegments = errors.New("bad segment routing header")
	// ErrNextSegment is a next segment that is no other server's, to which servers pass nothing on.
	ErrNextSegment = errors.New("next segment is no other server's")
	// ErrGRE is a GRE header with a version, a flag or a protocol that balancers do not send.
	ErrGRE = errors.New("bad GRE header")
	// ErrFragment is a fragment of an outer packet.
	ErrFragment = errors.New("fragment of an outer packet")
	// ErrCongestion is a packet marked CE on the way whose inner header cannot say so.
	ErrCongestion = errors.New("congestion marked on a packet that is not ECN-capable")
	// ErrNotServed is a VIP that the node does not serve, with no segment left to pass it to.
	ErrNotServed = errors.New("VIP is not served here")
)
