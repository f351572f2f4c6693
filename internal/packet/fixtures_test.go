// SPDX-License-Identifier: Apache-2.0

package packet_test

import (
	"net/netip"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// The addresses of all tests in this package.
var (
	client4 = netip.MustParseAddrPort("192.0.2.2:40000")
	client6 = netip.MustParseAddrPort("[2001:db8:c::2]:40000")
	vip4    = netip.MustParseAddrPort("198.51.100.1:80")
	vip6    = netip.MustParseAddrPort("[2001:db8:80::1]:80")

	balancer = netip.MustParseAddr("fd00:6c:0:1::")
	locator1 = netip.MustParsePrefix("fd00:5:0:1::/64")
	deliver1 = srv6.SID{Locator: locator1, Function: srv6.Deliver}.Addr()
	deliver2 = srv6.SID{Locator: netip.MustParsePrefix("fd00:5:0:2::/64"), Function: srv6.Deliver}.Addr()

	own     = packet.MAC{2, 0, 0, 0, 1, 1}
	nextHop = packet.MAC{2, 0, 0, 0, 1, 2}

	outer4 = [2]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}
	outer6 = [2]netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")}
)

func srv6Encap(kind desired.Encapsulation, segments ...netip.Addr) packet.Encap {
	return packet.Encap{
		Kind: kind, Sender: balancer, Segments: segments, FlowLabel: 0x12345, Own: own, NextHop: nextHop,
	}
}

// whole returns the encapsulation with the whole segment list.
func whole(e packet.Encap) packet.Encap {
	e.Whole = true
	return e
}

func tunnel(kind desired.Encapsulation, outer [2]netip.Addr) packet.Encap {
	return packet.Encap{
		Kind: kind, Source: outer[0], Destination: outer[1], FlowLabel: 0x12345, Own: own, NextHop: nextHop,
	}
}

// encapsulations are all encapsulations with the number of bytes that they add, as in the table of
// the wire format, and the IP versions that they carry.
var encapsulations = []struct {
	name     string
	encap    packet.Encap
	overhead int
	inner    []int
}{
	{"srv6-insert, known flow", srv6Encap(desired.SRv6Insert, deliver1), 56, []int{6}},
	{"srv6-insert, new flow", srv6Encap(desired.SRv6Insert, deliver1, deliver2), 72, []int{6}},
	{"srv6-encap, known flow", srv6Encap(desired.SRv6Encap, deliver1), 40, []int{4, 6}},
	{"srv6-encap, new flow", srv6Encap(desired.SRv6Encap, deliver1, deliver2), 64, []int{4, 6}},
	{"gre over IPv4", tunnel(desired.GRE, outer4), 24, []int{4, 6}},
	{"gre over IPv6", tunnel(desired.GRE, outer6), 44, []int{4, 6}},
	{"ipip over IPv4", tunnel(desired.IPIP, outer4), 20, []int{4, 6}},
	{"ipip over IPv6", tunnel(desired.IPIP, outer6), 40, []int{4, 6}},
}
