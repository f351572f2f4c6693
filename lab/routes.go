// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// configure adds the node's addresses, brings its links up and adds its routes.
func (n *Node) configure() error {
	err := n.netlink(func(h *netlink.Handle) error {
		if err := n.addAddresses(h); err != nil {
			return err
		}
		return n.addRoutes(h)
	})
	if err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	return nil
}

// addAddresses adds the addresses of all interfaces of the node, and brings the interfaces up.
// Fabric and switches have no addresses, and the interfaces of the fabric are up already.
func (n *Node) addAddresses(h *netlink.Handle) error {
	switch n.Role {
	case RoleFabric:
		return nil
	case RoleSwitch:
		return errors.Join(addInterface(h, switchPort(networkPort)), addInterface(h, switchPort(hostPort)))
	}
	loopback := []netip.Prefix{}
	if n.Locator.IsValid() {
		// Health checks and users reach a node at the first address of its locator.
		loopback = append(loopback, netip.PrefixFrom(host(n.Locator, 1), 128))
	}
	if n.Role == RoleBalancer && n.lab.Topology.hasProxies() {
		for _, vip := range n.lab.Topology.vips() {
			loopback = append(loopback, netip.PrefixFrom(vip, vip.BitLen()))
		}
	}
	if err := addInterface(h, "lo", loopback...); err != nil {
		return err
	}
	if n.Role == RoleEdge && n.lab.Topology.IPv4Only {
		if err := n.disableIPv6(uplink); err != nil {
			return err
		}
	}
	var onUplink []netip.Prefix
	for _, address := range n.addresses() {
		bits := 64
		if address.Is4() {
			bits = 24
		}
		onUplink = append(onUplink, netip.PrefixFrom(address, bits))
	}
	if err := addInterface(h, uplink, onUplink...); err != nil {
		return err
	}
	if n.hasOuter() {
		return addInterface(h, outer, netip.PrefixFrom(n.Outer6, 64), netip.PrefixFrom(n.Outer4, 24))
	}
	if n.Role != RoleEdge {
		return nil
	}
	for _, balancer := range n.lab.Nodes {
		if !balancer.hasOuter() {
			continue
		}
		gateways := balancer.outerGateways()
		err := addInterface(h, balancer.Name,
			netip.PrefixFrom(gateways[0], 64), netip.PrefixFrom(gateways[1], 24))
		if err != nil {
			return err
		}
	}
	return addInterface(h, downlink,
		netip.PrefixFrom(host(clientNet6, 1), 64), netip.PrefixFrom(host(clientNet4, 1), 24))
}

// disableIPv6 makes the kernel send no IPv6 packets by an interface.
func (n *Node) disableIPv6(name string) error {
	return n.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0)
	})
}

// addInterface adds addresses to an interface and brings it up.
func addInterface(h *netlink.Handle, name string, prefixes ...netip.Prefix) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("interface %s: set up: %w", name, err)
	}
	for _, prefix := range prefixes {
		// Without IFA_F_NODAD an IPv6 address is unusable until a kernel worker finds that
		// duplicate address detection is off.
		address := &netlink.Addr{IPNet: ipNet(prefix), Flags: unix.IFA_F_NODAD}
		if err := h.AddrAdd(link, address); err != nil {
			return fmt.Errorf("interface %s: add address %s: %w", name, prefix, err)
		}
	}
	return nil
}

// addRoutes adds the node's routes. Fabric and switches have none. Each other node except the edge
// router gets default routes. Client and edge router get routes of the further client addresses.
// All nodes except the client get routes of the locators. SetNextHops adds the routes of VIPs.
func (n *Node) addRoutes(h *netlink.Handle) error {
	gateways := n.lab.Node("edge").addresses()
	switch n.Role {
	case RoleFabric, RoleSwitch:
		return nil
	case RoleClient:
		gateways = []netip.Addr{host(clientNet6, 1), host(clientNet4, 1)}
	case RoleEdge:
		gateways = nil
	case RoleBalancer:
		if n.hasOuter() {
			gateways = n.outerGateways()
		}
	}
	for _, gateway := range gateways {
		all := netip.PrefixFrom(unspecified(gateway), 0)
		if err := addRoute(h, all, gateway); err != nil {
			return err
		}
	}
	switch n.Role {
	case RoleClient:
		return addLocalRoutes(h, clients6, clients4)
	case RoleEdge:
		client := n.lab.Node("client")
		err := errors.Join(addRoute(h, clients6, client.IPv6), addRoute(h, clients4, client.IPv4))
		if err != nil {
			return err
		}
	}
	return n.addLocatorRoutes(h)
}

// addLocatorRoutes adds routes to the locators of all other nodes. For the node's own locator, it
// adds a route that discards packets to unknown SIDs. Otherwise these packets would follow the
// default route back to the edge router. Packets to the SIDs and addresses that the node has do not
// use this route.
func (n *Node) addLocatorRoutes(h *netlink.Handle) error {
	if n.lab.Topology.IPv4Only { // the kernel sends nothing to locators
		return nil
	}
	for _, other := range n.lab.Nodes {
		switch {
		case !other.Locator.IsValid():
			continue
		case other == n:
			route := &netlink.Route{Dst: ipNet(n.Locator), Type: unix.RTN_BLACKHOLE}
			if err := h.RouteAdd(route); err != nil {
				return fmt.Errorf("add route blackhole %s: %w", n.Locator, err)
			}
		default:
			// SIDs do not answer neighbour solicitations, so the route needs a next hop.
			via := other.IPv6
			if n.Role == RoleEdge {
				via, _ = other.outside()
			}
			if err := addRoute(h, other.Locator, via); err != nil {
				return err
			}
		}
	}
	return nil
}

// addRoute adds a route to a prefix by a next hop.
func addRoute(h *netlink.Handle, to netip.Prefix, via netip.Addr) error {
	if err := h.RouteAdd(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("add route %s via %s: %w", to, via, err)
	}
	return nil
}

// addLocalRoutes adds local routes, by which the node accepts packets to all addresses of the
// prefixes.
func addLocalRoutes(h *netlink.Handle, prefixes ...netip.Prefix) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("interface lo: %w", err)
	}
	for _, prefix := range prefixes {
		route := &netlink.Route{
			Dst: ipNet(prefix), LinkIndex: lo.Attrs().Index, Type: unix.RTN_LOCAL,
			Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
		}
		if err := h.RouteAdd(route); err != nil {
			return fmt.Errorf("add route local %s: %w", prefix, err)
		}
	}
	return nil
}

// SetNextHops makes the edge router distribute every VIP's packets over exactly the named
// balancers, by kernel ECMP with a hash of the 5-tuple. The kernel uses the hash-threshold
// algorithm, by which some flows change their balancer when the set of balancers changes (RFC
// 2992). Without balancers, SetNextHops removes the routes, so the VIPs become unreachable.
func (l *Lab) SetNextHops(balancers ...string) error {
	if router := l.Topology.Edge.Router; router != "" {
		return fmt.Errorf("the edge router runs %s: the balancers tell it their routes", router)
	}
	var nodes []*Node
	for _, name := range balancers {
		n := l.Node(name)
		if n == nil || n.Role != RoleBalancer {
			return fmt.Errorf("next hop %q: no such balancer", name)
		}
		nodes = append(nodes, n)
	}
	return l.Node("edge").netlink(func(h *netlink.Handle) error {
		for _, vip := range l.Topology.vips() {
			if err := replaceVIPRoute(h, vip, nodes); err != nil {
				return fmt.Errorf("edge: route of VIP %s: %w", vip, err)
			}
		}
		return nil
	})
}

// replaceVIPRoute gives the route of a VIP the balancers as next hops. It deletes the route if
// there are no balancers.
func replaceVIPRoute(h *netlink.Handle, vip netip.Addr, balancers []*Node) error {
	dst := ipNet(netip.PrefixFrom(vip, vip.BitLen()))
	if len(balancers) == 0 {
		err := h.RouteDel(&netlink.Route{Dst: dst})
		if errors.Is(err, unix.ESRCH) {
			return nil
		}
		return err
	}
	route := &netlink.Route{Dst: dst}
	for _, n := range balancers {
		name := uplink // the edge router's interface towards the balancer
		if n.hasOuter() {
			name = n.Name
		}
		link, err := h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("interface %s: %w", name, err)
		}
		gateway, ipv4 := n.outside()
		if vip.Is4() {
			gateway = ipv4
		}
		route.MultiPath = append(route.MultiPath,
			&netlink.NexthopInfo{LinkIndex: link.Attrs().Index, Gw: gateway.AsSlice()})
	}
	return h.RouteReplace(route)
}

// ipNet converts a prefix to the type that package netlink uses.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// unspecified returns the all-zero address of an address's family.
func unspecified(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
