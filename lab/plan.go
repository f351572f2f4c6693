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
// servers at layer 2. Its ports are named after the nodes.
const (
	RoleClient   Role = "client"
	RoleEdge     Role = "edge"
	RoleFabric   Role = "fabric"
	RoleBalancer Role = "balancer"
	RoleServer   Role = "server"
)

const (
	maxBalancers = 16
	maxServers   = 128
)

// Names of interfaces. The uplink of the client is its link to the edge router. The uplink of all
// other nodes is their link to the fabric; the fabric has none. The edge router's links to
// balancers with two arms are named after the balancers.
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
	// All addresses of these prefixes are the client's, too. The edge router routes them to it.
	clients6   = netip.MustParsePrefix("2001:db8:d::/120")
	clients4   = netip.MustParsePrefix("198.18.0.0/24") // RFC 2544
	fabricNet6 = netip.MustParsePrefix("fd00:fab::/64")
	fabricNet4 = netip.MustParsePrefix("10.77.0.0/24")
	outerNets6 = netip.MustParsePrefix("fd00:ed::/48") // fd00:ed:0:<i>::/64, the edge router's links to balancers
	outerNets4 = netip.MustParsePrefix("10.78.0.0/16") // 10.78.<i>.0/24

	balancerLocators = netip.MustParsePrefix("fd00:6c::/48") // fd00:6c:0:<i>::/64
	serverLocators   = netip.MustParsePrefix("fd00:5::/48")  // fd00:5:0:<j>::/64
)

// reserved tells whether an address is in a prefix that the lab itself uses.
func reserved(addr netip.Addr) bool {
	own := []netip.Prefix{clientNet6, clientNet4, clients6, clients4, fabricNet6, fabricNet4, outerNets6, outerNets4, balancerLocators, serverLocators}
	return slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// ClientAddresses returns n further addresses of the client in the family of the VIP, at most 254.
// A load generator that uses several has more ports.
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

// Spec describes a node, as it follows from the topology.
type Spec struct {
	Name string `json:"name"`
	Role Role   `json:"role"`
	// IPv6 and IPv4 are the node's addresses on its uplink. The fabric has none.
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

// Specs lists the topology's nodes: fabric, edge, client, the balancers from lb1 and the servers
// from s1.
func (t Topology) Specs() []Spec {
	specs := []Spec{
		{Name: "fabric", Role: RoleFabric},
		{Name: "edge", Role: RoleEdge, IPv6: host(fabricNet6, 1), IPv4: host(fabricNet4, 1)},
		{Name: "client", Role: RoleClient, IPv6: host(clientNet6, 2), IPv4: host(clientNet4, 2)},
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
	return specs
}

// hasOuter tells whether a node is a balancer with two arms.
func (s Spec) hasOuter() bool { return s.Outer6.IsValid() }

// outerGateways returns the edge router's addresses on the link to a balancer with two arms.
func (s Spec) outerGateways() []netip.Addr { return []netip.Addr{s.Outer6.Prev(), s.Outer4.Prev()} }

// outside returns the addresses by which clients' packets reach a balancer.
func (s Spec) outside() (ipv6, ipv4 netip.Addr) {
	if s.hasOuter() {
		return s.Outer6, s.Outer4
	}
	return s.IPv6, s.IPv4
}

// application returns the application of the server with this number.
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

// fabricSpecs returns the nodes at the fabric. The fabric's ports are named after them.
func (t Topology) fabricSpecs() []Spec {
	return slices.DeleteFunc(t.Specs(), func(s Spec) bool { return s.Role == RoleFabric || s.Role == RoleClient })
}

// enumerate joins the names of nodes. It writes three or more names with consecutive numbers as s1
// to s4.
func enumerate(names []string) string {
	var parts []string
	for i := 0; i < len(names); {
		end := i + 1
		for end < len(names) && names[end] == successor(names[end-1]) {
			end++
		}
		if end-i < 3 {
			end = i + 1
			parts = append(parts, names[i])
		} else {
			parts = append(parts, names[i]+" to "+names[end-1])
		}
		i = end
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

// host returns address number n of a prefix.
func host(prefix netip.Prefix, n int) netip.Addr {
	addr := prefix.Addr().AsSlice()
	low := addr[len(addr)-4:]
	binary.BigEndian.PutUint32(low, binary.BigEndian.Uint32(low)|uint32(n))
	a, _ := netip.AddrFromSlice(addr)
	return a
}

// locator returns the /64 whose fourth group is n, written in hexadecimal.
func locator(prefix netip.Prefix, n int) netip.Prefix {
	addr := prefix.Addr().As16()
	binary.BigEndian.PutUint16(addr[6:], uint16(n))
	return netip.PrefixFrom(netip.AddrFrom16(addr), 64)
}
