// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// frameOf returns a frame with a packet of a flow.
func frameOf(flow dataplane.Flow, options ...packet.Option) []byte {
	if flow.Protocol == desired.UDP {
		return packet.UDP(flow.Source, flow.Destination, options...)
	}
	return packet.TCP(flow.Source, flow.Destination, options...)
}

// reversed returns the flow in the other direction.
func reversed(flow dataplane.Flow) dataplane.Flow {
	flow.Source, flow.Destination = flow.Destination, flow.Source
	return flow
}

// The addresses of the tests.
var (
	client4 = netip.MustParseAddrPort("192.0.2.2:40000")
	client6 = netip.MustParseAddrPort("[2001:db8:c::2]:40000")
	vip4    = netip.MustParseAddr("198.51.100.1")
	vip6    = netip.MustParseAddr("2001:db8:80::1")
)

// node returns a configuration with the balancer's addresses for all encapsulations.
func node() desired.BalancerNode {
	return desired.BalancerNode{
		Interface: "eth0",
		Locator:   netip.MustParsePrefix("fd00:6c:0:1::/64"),
		Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00:a::1")},
		Seed:      1,
		Limits:    desired.Limits{Flows: 1024, Servers: 64},
		Reject:    true,

		DropRemovedVIPs: desired.DefaultDropRemovedVIPs,
	}
}

func balancerOf(services ...desired.Service) *desired.Balancer {
	return &desired.Balancer{Node: node(), Services: services}
}

// serviceOf returns a service with default settings.
func serviceOf(name string, vip netip.Addr, port desired.Port, protocol desired.Protocol,
	kind desired.Encapsulation, servers ...desired.Server,
) desired.Service {
	return desired.Service{
		Name: name, VIP: vip, Port: port, Protocol: protocol,
		Placement: desired.PlacementHash, Persistence: desired.PersistenceTable, Encapsulation: kind,
		Candidates: 3, Generations: 3, Buckets: 251,
		Timeouts: desired.Timeouts{New: time.Minute, Established: time.Hour, Closing: time.Minute, Silent: 10 * time.Second},
		OnDrain:  desired.OnDrainMoveUDP,
		Servers:  slices.Clone(servers), // several services may be given the same ones
	}
}

// srv6Server returns a server with the locator fd00:5:0:<number>::/64.
func srv6Server(name string, number uint8, weight uint32) desired.Server {
	locator := netip.AddrFrom16([16]byte{0xfd, 0, 0, 5, 7: number})
	return desired.Server{Name: name, Locator: netip.PrefixFrom(locator, 64), Weight: &weight}
}

func tunnelServer(name, address string) desired.Server {
	one := uint32(1)
	return desired.Server{Name: name, Address: netip.MustParseAddr(address), Weight: &one}
}

// flowTo returns a flow to a VIP, from the client of the same address family.
func flowTo(vip netip.Addr, port uint16, protocol desired.Protocol) dataplane.Flow {
	source := client6
	if vip.Is4() {
		source = client4
	}
	return dataplane.Flow{Protocol: protocol, Source: source, Destination: netip.AddrPortFrom(vip, port)}
}

// fromAddress returns the flow with another client address.
func fromAddress(flow dataplane.Flow, address string) dataplane.Flow {
	flow.Source = netip.AddrPortFrom(netip.MustParseAddr(address), flow.Source.Port())
	return flow
}

// fromPort returns the flow with another client port.
func fromPort(flow dataplane.Flow, port uint16) dataplane.Flow {
	flow.Source = netip.AddrPortFrom(flow.Source.Addr(), port)
	return flow
}
