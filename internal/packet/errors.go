// SPDX-License-Identifier: Apache-2.0

package packet

import "errors"

// Reasons why a packet is not forwarded, encapsulated or delivered. Each error of this package
// wraps one of them.
var (
	// ErrTruncated: a header or a length extends beyond the end of the packet.
	ErrTruncated = errors.New("packet is truncated")
	// ErrNotIP: the EtherType or the version is neither IPv4 nor IPv6.
	ErrNotIP = errors.New("not an IP packet")
	// ErrHeader: the fields of an IP header contradict each other.
	ErrHeader = errors.New("bad IP header")
	// ErrHopLimit: the hop limit or TTL does not allow another hop.
	ErrHopLimit = errors.New("hop limit exceeded")
	// ErrFamily: the encapsulation cannot carry this IP version, or cannot be carried by it.
	ErrFamily = errors.New("wrong IP version")
	// ErrEncap: an Encap is invalid.
	ErrEncap = errors.New("bad encapsulation")
	// ErrTooLong: the encapsulated packet is too long for the length field of its header.
	ErrTooLong = errors.New("packet is too long")

	// ErrNotEncapsulated: a packet to a SID or a tunnel's end contains no packet to deliver.
	ErrNotEncapsulated = errors.New("not encapsulated")
	// ErrSegments: a segment routing header is missing or malformed, or has no segment left.
	ErrSegments = errors.New("bad segment routing header")
	// ErrGRE: a GRE header has a version, a flag or a protocol that balancers do not send.
	ErrGRE = errors.New("bad GRE header")
	// ErrFragment: the outer IPv4 packet is a fragment.
	ErrFragment = errors.New("fragment of an outer packet")
	// ErrCongestion: the packet was marked CE on the path, and its inner header is not ECN-capable.
	ErrCongestion = errors.New("congestion marked on a packet that is not ECN-capable")
)
