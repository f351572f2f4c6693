// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Role is what a node does.
type Role string

// The roles of nodes. The fabric is the switch that connects the edge router, the balancers and the
// servers at layer 2. Its ports are named after the nodes. A node with RoleSwitch is a software
// switch between the fabric and a balancer.
const (
	RoleClient   Role = "client"
	RoleEdge     Role = "edge"
	RoleFabric   Role = "fabric"
	RoleSwitch   Role = "switch"
	RoleBalancer Role = "balancer"
	RoleServer   Role = "server"
)

const (
	maxBalancers = 16
	maxServers   = 128
)

// Names of interfaces. The client's uplink is its link to the edge router. The uplink of each other
// node is its link to the fabric. The fabric has no uplink. The edge router's link to a balancer
// with two arms has the name of the balancer.
const (
	uplink   = "eth0"
	downlink = "eth1" // the edge router's link to the client
	outer    = "eth1" // a balancer's second link, to the edge router
	bridge   = "br0"
)

// Prefixes of links. The client's side has documentation prefixes (RFC 3849, RFC 5737). All other
// links have private prefixes (RFC 4193, RFC 1918).
var (
	clientNet6 = netip.MustParsePrefix("2001:db8:c::/64")
	clientNet4 = netip.MustParsePrefix("198.51.100.0/24")
	// The client also accepts packets to all addresses of these two prefixes, and the edge router
	// sends such packets to the client.
	clients6   = netip.MustParsePrefix("2001:db8:d::/120")
	clients4   = netip.MustParsePrefix("198.18.0.0/24") // RFC 2544
	fabricNet6 = netip.MustParsePrefix("fd00:fab::/64")
	fabricNet4 = netip.MustParsePrefix("10.77.0.0/24")
	// The link between the edge router and balancer i, if balancers have two arms, has the prefixes
	// fd00:ed:0:<i>::/64 and 10.78.<i>.0/24. Here and below, i is hexadecimal in IPv6 prefixes.
	outerNets6 = netip.MustParsePrefix("fd00:ed::/48")
	outerNets4 = netip.MustParsePrefix("10.78.0.0/16")

	balancerLocators = netip.MustParsePrefix("fd00:6c::/48") // of balancer i: fd00:6c:0:<i>::/64
	serverLocators   = netip.MustParsePrefix("fd00:5::/48")  // of server j: fd00:5:0:<j>::/64
	// The locator of a node on a fabric without IPv6 is this prefix, and then its IPv4 address.
	ipv4Locators = netip.MustParsePrefix("fd00:6c::/32")
)

// reserved tells whether an address is in a prefix that the lab itself uses, so that it cannot be a
// VIP.
func reserved(addr netip.Addr) bool {
	own := []netip.Prefix{
		clientNet6, clientNet4, clients6, clients4, fabricNet6, fabricNet4, outerNets6, outerNets4,
		balancerLocators, serverLocators, ipv4Locators,
	}
	return slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// ClientAddresses returns n addresses of clients6 or clients4, in the family of the VIP, at most
// 254. A load generator that uses n addresses can have n times as many connections to a VIP at a
// time.
func ClientAddresses(vip netip.Addr, n int) []netip.Addr {
	prefix := clients6
	if vip.Is4() {
		prefix = clients4
	}
	var addresses []netip.Addr
	for i := 1; i <= min(n, 254); i++ {
		addresses = append(addresses, host(prefix, i))
	}
	return addresses
}

// Spec has the properties of a node that follow from the topology.
type Spec struct {
	Name string `json:"name"`
	Role Role   `json:"role"`
	// IPv6 and IPv4 are the node's addresses on its uplink. Fabric and switches have no addresses, and
	// no node has an IPv6 address on a fabric without IPv6.
	IPv6 netip.Addr `json:"ipv6,omitzero"`
	IPv4 netip.Addr `json:"ipv4,omitzero"`
	// Outer6 and Outer4 are the addresses of a balancer with two arms on its link to the edge
	// router.
	Outer6 netip.Addr `json:"outer6,omitzero"`
	Outer4 netip.Addr `json:"outer4,omitzero"`
	// Locator is the /64 prefix of a balancer's or server's SIDs.
	Locator netip.Prefix `json:"locator,omitzero"`
	// Application is the HTTP server that a server runs.
	Application Application `json:"application,omitempty"`
}

// Specs lists the topology's nodes: fabric, edge, client, the switches from sw1 on, the balancers
// from lb1 on, and the servers from s1 on. Switch i is in front of balancer i. On the fabric,
// balancer i has the addresses fd00:fab::1:<i> and 10.77.0.<10+i>, and server j has fd00:fab::2:<j>
// and 10.77.0.<100+j>.
func (t Topology) Specs() []Spec {
	specs := []Spec{
		{Name: "fabric", Role: RoleFabric},
		{Name: "edge", Role: RoleEdge, IPv6: host(fabricNet6, 1), IPv4: host(fabricNet4, 1)},
		{Name: "client", Role: RoleClient, IPv6: host(clientNet6, 2), IPv4: host(clientNet4, 2)},
	}
	for i := 1; i <= t.Switches; i++ {
		specs = append(specs, Spec{Name: fmt.Sprintf("sw%d", i), Role: RoleSwitch})
	}
	for i := 1; i <= t.Balancers; i++ {
		spec := Spec{
			Name: fmt.Sprintf("lb%d", i), Role: RoleBalancer,
			IPv6: host(fabricNet6, 1<<16|i), IPv4: host(fabricNet4, 10+i),
			Locator: locator(balancerLocators, i),
		}
		if t.TwoArmed {
			spec.Outer6, spec.Outer4 = host(locator(outerNets6, i), 2), host(outerNets4, i<<8|2)
		}
		specs = append(specs, spec)
	}
	for j := 1; j <= t.Servers; j++ {
		specs = append(specs, Spec{
			Name: fmt.Sprintf("s%d", j), Role: RoleServer,
			IPv6: host(fabricNet6, 2<<16|j), IPv4: host(fabricNet4, 100+j),
			Locator: locator(serverLocators, j), Application: t.application(j),
		})
	}
	if t.IPv4Only {
		withoutIPv6(specs)
	}
	return specs
}

// withoutIPv6 takes the IPv6 addresses on the fabric from the nodes, and gives them locators with
// their IPv4 addresses.
func withoutIPv6(specs []Spec) {
	for i := range specs {
		s := &specs[i]
		if s.onFabric() {
			s.IPv6 = netip.Addr{}
		}
		if s.Locator.IsValid() {
			bytes, ipv4 := ipv4Locators.Addr().As16(), s.IPv4.As4()
			copy(bytes[4:], ipv4[:])
			s.Locator = netip.PrefixFrom(netip.AddrFrom16(bytes), 64)
		}
	}
}

// addresses returns the node's addresses on its uplink.
func (s Spec) addresses() []netip.Addr {
	return slices.DeleteFunc([]netip.Addr{s.IPv6, s.IPv4}, func(a netip.Addr) bool { return !a.IsValid() })
}

// hasOuter tells whether the node is a balancer with two arms.
func (s Spec) hasOuter() bool { return s.Outer6.IsValid() }

// outerGateways returns the edge router's addresses on its link to this balancer, which has two
// arms: first the IPv6 address, then the IPv4 address. Each is by 1 lower than the balancer's own.
func (s Spec) outerGateways() []netip.Addr { return []netip.Addr{s.Outer6.Prev(), s.Outer4.Prev()} }

// outside returns the balancer's addresses that the edge router uses as next hops of the VIPs.
func (s Spec) outside() (ipv6, ipv4 netip.Addr) {
	if s.hasOuter() {
		return s.Outer6, s.Outer4
	}
	return s.IPv6, s.IPv4
}

// application returns the application of the server with this number. The servers have the
// topology's applications in turn. If the topology has none, which is not valid, it returns an
// empty string.
func (t Topology) application(server int) Application {
	if len(t.Applications) == 0 {
		return ""
	}
	return t.Applications[(server-1)%len(t.Applications)]
}

// specs returns the topology's nodes with the role.
func (t Topology) specs(role Role) []Spec {
	return slices.DeleteFunc(t.Specs(), func(s Spec) bool { return s.Role != role })
}

// fabricSpecs returns the nodes behind the fabric's ports (onFabric).
func (t Topology) fabricSpecs() []Spec {
	return slices.DeleteFunc(t.Specs(), func(s Spec) bool { return !s.onFabric() })
}

// onFabric tells whether a port of the fabric has the node's name: those of the edge router,
// balancers and servers. A switch in front of a balancer is connected to the balancer's port.
func (s Spec) onFabric() bool {
	return s.Role == RoleEdge || s.Role == RoleBalancer || s.Role == RoleServer
}

// enumerate joins the names of nodes by commas. It writes three or more names with consecutive
// numbers as a range, such as "s1 to s4".
func enumerate(names []string) string {
	var parts []string
	for len(names) > 0 {
		run := 1 // the number of names with consecutive numbers
		for run < len(names) && names[run] == successor(names[run-1]) {
			run++
		}
		if run >= 3 {
			parts = append(parts, names[0]+" to "+names[run-1])
			names = names[run:]
		} else {
			parts = append(parts, names[0])
			names = names[1:]
		}
	}
	return strings.Join(parts, ", ")
}

// successor returns the name with the next number, or an empty string if the name does not end in a
// number.
func successor(name string) string {
	kind := strings.TrimRight(name, "0123456789")
	number, err := strconv.Atoi(name[len(kind):])
	if err != nil {
		return ""
	}
	return kind + strconv.Itoa(number+1)
}

// host returns address n of a prefix: its last 32 bits are those of the prefix's address, or'ed
// with n. The prefix's address must be zero where n has bits.
func host(prefix netip.Prefix, n int) netip.Addr {
	addr := prefix.Addr().AsSlice()
	low := addr[len(addr)-4:]
	binary.BigEndian.PutUint32(low, binary.BigEndian.Uint32(low)|uint32(n))
	a, _ := netip.AddrFromSlice(addr)
	return a
}

// locator returns the /64 of a /48 whose fourth group of 16 bits is n.
func locator(prefix netip.Prefix, n int) netip.Prefix {
	addr := prefix.Addr().As16()
	binary.BigEndian.PutUint16(addr[6:], uint16(n))
	return netip.PrefixFrom(netip.AddrFrom16(addr), 64)
}
