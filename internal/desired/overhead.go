// SPDX-License-Identifier: Apache-2.0

package desired

import "net/netip"

const (
	ipv4Header = 20
	ipv6Header = 40
)

// Overhead returns the number of bytes that an encapsulation adds to a packet to one server; see
// docs/understand/protocol.md. tunnels are the addresses of the servers for gre and ipip. If one of
// them is an IPv6 address, Overhead assumes an outer IPv6 header.
func (e Encapsulation) Overhead(tunnels []netip.Addr) int {
	outer := ipv4Header
	for _, a := range tunnels {
		if a.Is6() {
			outer = ipv6Header
		}
	}
	switch e {
	case SRv6Insert:
		return 8 + 3*16 // the segment routing header, with the balancer, the server and the VIP
	case SRv6Encap:
		return ipv6Header
	case GRE:
		return outer + 4 // the GRE header
	default:
		return outer
	}
}
