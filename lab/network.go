// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// buildNetwork makes the namespaces, links, addresses and routes of the whole lab.
func (l *Lab) buildNetwork(ctx context.Context) error {
	for _, n := range l.Nodes {
		if err := n.createNamespace(); err != nil {
			return err
		}
		if err := n.setSysctls(); err != nil {
			return err
		}
	}
	if err := l.buildLinks(); err != nil {
		return err
	}
	for _, n := range l.Nodes {
		if err := n.configure(); err != nil {
			return err
		}
	}
	if err := l.addNeighbours(); err != nil {
		return err
	}
	if l.Topology.Edge.Router == "" {
		if err := l.SetNextHops(l.balancers()...); err != nil {
			return err
		}
	}
	return l.awaitNetwork(ctx)
}

func (l *Lab) awaitNetwork(ctx context.Context) error {
	for _, n := range l.Nodes {
		if err := n.awaitNetwork(ctx); err != nil {
			return err
		}
	}
	return nil
}

// awaitNetwork returns when all links are up and all addresses accept packets. The kernel takes up
// to a second to notice that a link is up, and drops packets until then. It adds the local route of
// an IPv6 address some time after the address, and reports no route until then.
func (n *Node) awaitNetwork(ctx context.Context) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if ready, err := n.networkReady(); err != nil || ready {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

func (n *Node) networkReady() (ready bool, err error) {
	err = n.netlink(func(h *netlink.Handle) (err error) {
		if ready, err = linksUp(h); err == nil && ready {
			ready, err = addressesLocal(h)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
		return nil
	})
	return ready, err
}

func linksUp(h *netlink.Handle) (bool, error) {
	links, err := h.LinkList()
	if err != nil {
		return false, fmt.Errorf("list links: %w", err)
	}
	return !slices.ContainsFunc(links, func(link netlink.Link) bool {
		_, ours := link.(*netlink.Veth) // some kernels add tunnel devices to every namespace
		return ours && link.Attrs().OperState != netlink.OperUp
	}), nil
}

// addressesLocal tells whether the kernel delivers packets to each IPv6 address to the node itself.
func addressesLocal(h *netlink.Handle) (bool, error) {
	addresses, err := h.AddrList(nil, netlink.FAMILY_V6)
	if err != nil {
		return false, fmt.Errorf("list addresses: %w", err)
	}
	for _, address := range addresses {
		if address.IP.IsLinkLocalUnicast() { // added by the kernel
			continue
		}
		routes, err := h.RouteGet(address.IP)
		if errors.Is(err, unix.ENETUNREACH) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("route to %s: %w", address.IP, err)
		}
		if routes[0].Type != unix.RTN_LOCAL {
			return false, nil
		}
	}
	return true, nil
}

// netlink runs f with a netlink handle of the node.
func (n *Node) netlink(f func(*netlink.Handle) error) error {
	ns, err := netns.GetFromPath(n.namespacePath())
	if err != nil {
		return fmt.Errorf("%s: network namespace %s: %w", n.Name, n.namespacePath(), err)
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("%s: netlink: %w", n.Name, err)
	}
	defer h.Close()
	return f(h)
}

// sysctl is a setting of the node's network namespace: a path under /proc/sys/net and its value.
type sysctl struct{ path, value string }

// setSysctls sets the sysctls. It runs before there are interfaces, because interfaces inherit the
// values under conf/default.
func (n *Node) setSysctls() error {
	settings := []sysctl{
		{"ipv6/conf/all/disable_ipv6", "0"},
		{"ipv6/conf/default/disable_ipv6", "0"},
		// Link-local addresses are unique here. Duplicate address detection would take a second or
		// two. During that time servers could not resolve each other's link addresses, which they
		// need to pass packets on.
		{"ipv6/conf/default/accept_dad", "0"},
		{"ipv6/conf/default/accept_ra", "0"},
		// IPv4 settings may be copied from the initial namespace. With direct server return, a
		// packet can arrive on an interface that does not lead back to its source.
		{"ipv4/conf/all/rp_filter", "0"},
		{"ipv4/conf/default/rp_filter", "0"},
	}
	switch n.Role {
	case RoleEdge:
		settings = append(settings,
			sysctl{"ipv4/ip_forward", "1"},
			sysctl{"ipv6/conf/all/forwarding", "1"},
			// Use ECMP by the 5-tuple, as routers in data centres do. The default uses the flow
			// label instead of ports, and Linux changes the flow label when a connection
			// retransmits.
			sysctl{"ipv4/fib_multipath_hash_policy", "1"},
			sysctl{"ipv6/fib_multipath_hash_policy", "1"},
		)
	case RoleServer:
		// An agent passes packets on to the next segment. The kernel's routing lookup for XDP works
		// only on a router. Balancers forward only by XDP. If they were routers, packets for a VIP
		// would loop between them and the edge router while no daemon is attached.
		settings = append(settings, sysctl{"ipv6/conf/all/forwarding", "1"})
		if n.Application != Nginx {
			// As in the papers (6LB, section VI-A; SRLB, section IV): a full accept queue resets
			// connections.
			settings = append(settings, sysctl{"ipv4/tcp_abort_on_overflow", "1"})
		}
	case RoleFabric:
		// If br_netfilter is loaded, it would pass bridged packets to iptables, which could drop
		// them.
		for _, family := range []string{"arp", "ip", "ip6"} {
			path := "bridge/bridge-nf-call-" + family + "tables"
			if _, err := os.Stat(filepath.Join("/proc/sys/net", path)); err == nil {
				settings = append(settings, sysctl{path, "0"})
			}
		}
	}
	return n.Do(func() error {
		for _, s := range settings {
			if err := os.WriteFile(filepath.Join("/proc/sys/net", s.path), []byte(s.value), 0); err != nil {
				return fmt.Errorf("%s: sysctl net.%s=%s: %w", n.Name, strings.ReplaceAll(s.path, "/", "."), s.value, err)
			}
		}
		return nil
	})
}

// buildLinks makes the switch and the cables. There is a cable between client and edge router, one
// between the fabric and each node at it, and one between the edge router and each balancer with
// two arms.
func (l *Lab) buildLinks() error {
	fabric, edge, client := l.Node("fabric"), l.Node("edge"), l.Node("client")
	snooping := false
	br := &netlink.Bridge{
		LinkAttrs: netlink.LinkAttrs{Name: bridge, MTU: l.Topology.MTU.Fabric},
		// There is no querier for the multicast groups of neighbour discovery, so snooping could
		// not learn their members.
		MulticastSnooping: &snooping,
	}
	err := fabric.netlink(func(h *netlink.Handle) error {
		if err := h.LinkAdd(br); err != nil {
			return fmt.Errorf("add %s: %w", bridge, err)
		}
		return h.LinkSetUp(br)
	})
	if err != nil {
		return fmt.Errorf("fabric: %w", err)
	}
	for _, n := range l.Nodes {
		if n.Role == RoleFabric || n.Role == RoleClient {
			continue
		}
		if err := connect(fabric, n.Name, n, uplink, l.Topology.MTU.Fabric); err != nil {
			return err
		}
		if err := fabric.plugIn(n, br); err != nil {
			return fmt.Errorf("fabric: port %s: %w", n.Name, err)
		}
		if !n.hasOuter() {
			continue
		}
		if err := connect(edge, n.Name, n, outer, l.Topology.MTU.Fabric); err != nil {
			return err
		}
		if err := edge.Do(func() error { return prepareForXDP(n.Name, n.Role) }); err != nil {
			return fmt.Errorf("edge: %s: %w", n.Name, err)
		}
	}
	// Connect these last, so that the two ends have different interface numbers in their
	// namespaces. With equal numbers the kernel would take the veths for hardware, and report only
	// after up to a second that they are up.
	if err := connect(edge, downlink, client, uplink, l.Topology.MTU.Client); err != nil {
		return err
	}
	return edge.forgetHashes()
}

// forgetHashes makes the edge router distribute packets from clients by the 5-tuple alone
// (wire.bpf.c).
func (n *Node) forgetHashes() error {
	var wire wireObjects
	if err := loadWireObjects(&wire, nil); err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	defer wire.Close()
	err := n.netlink(func(h *netlink.Handle) error {
		link, err := h.LinkByName(downlink)
		if err != nil {
			return fmt.Errorf("interface %s: %w", downlink, err)
		}
		if err := addClsact(h, link); err != nil {
			return err
		}
		return attachFilter(h, link, netlink.HANDLE_MIN_INGRESS, wire.ForgetHash)
	})
	if err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	return nil
}

// connect connects two nodes by a pair of veth interfaces.
func connect(a *Node, nameA string, b *Node, nameB string, mtu int) error {
	ns, err := netns.GetFromPath(b.namespacePath())
	if err != nil {
		return fmt.Errorf("%s: network namespace %s: %w", b.Name, b.namespacePath(), err)
	}
	defer ns.Close()
	return a.netlink(func(h *netlink.Handle) error {
		veth := &netlink.Veth{
			LinkAttrs:     netlink.LinkAttrs{Name: nameA, MTU: mtu},
			PeerName:      nameB,
			PeerNamespace: netlink.NsFd(ns),
			PeerMTU:       uint32(mtu),
		}
		if err := h.LinkAdd(veth); err != nil {
			return fmt.Errorf("connect %s %s to %s %s: %w", a.Name, nameA, b.Name, nameB, err)
		}
		return nil
	})
}

// plugIn adds the fabric's end of a node's cable to the bridge. If the node has a data path, plugIn
// first prepares the end for XDP.
func (n *Node) plugIn(node *Node, br netlink.Link) error {
	if node.Role == RoleBalancer || node.Role == RoleServer {
		if err := n.Do(func() error { return prepareForXDP(node.Name, node.Role) }); err != nil {
			return err
		}
	}
	return n.netlink(func(h *netlink.Handle) error {
		port, err := h.LinkByName(node.Name)
		if err != nil {
			return err
		}
		if err := addClsact(h, port); err != nil { // now, because no packets can be lost yet
			return err
		}
		if err := h.LinkSetMaster(port, br); err != nil {
			return err
		}
		return h.LinkSetUp(port)
	})
}

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

func (n *Node) addAddresses(h *netlink.Handle) error {
	if n.Role == RoleFabric {
		return nil
	}
	lo := []netip.Prefix{}
	up := []netip.Prefix{netip.PrefixFrom(n.IPv6, 64), netip.PrefixFrom(n.IPv4, 24)}
	if n.Locator.IsValid() {
		// Health checks and users reach a node at the first address of its locator.
		lo = append(lo, netip.PrefixFrom(host(n.Locator, 1), 128))
	}
	if err := addInterface(h, "lo", lo...); err != nil {
		return err
	}
	if err := addInterface(h, uplink, up...); err != nil {
		return err
	}
	if n.hasOuter() {
		return addInterface(h, outer, netip.PrefixFrom(n.Outer6, 64), netip.PrefixFrom(n.Outer4, 24))
	}
	if n.Role != RoleEdge {
		return nil
	}
	for _, other := range n.lab.Nodes {
		if !other.hasOuter() {
			continue
		}
		gateways := other.outerGateways()
		if err := addInterface(h, other.Name, netip.PrefixFrom(gateways[0], 64), netip.PrefixFrom(gateways[1], 24)); err != nil {
			return err
		}
	}
	return addInterface(h, downlink,
		netip.PrefixFrom(host(clientNet6, 1), 64), netip.PrefixFrom(host(clientNet4, 1), 24))
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
		if err := h.AddrAdd(link, &netlink.Addr{IPNet: ipNet(prefix), Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("interface %s: add address %s: %w", name, prefix, err)
		}
	}
	return nil
}

// addRoutes adds all routes except for those of the VIPs, which SetNextHops adds.
func (n *Node) addRoutes(h *netlink.Handle) error {
	edge := n.lab.Node("edge")
	gateways := []netip.Addr{edge.IPv6, edge.IPv4}
	switch n.Role {
	case RoleFabric:
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
		if err := errors.Join(addRoute(h, clients6, client.IPv6), addRoute(h, clients4, client.IPv4)); err != nil {
			return err
		}
	}
	for _, other := range n.lab.Nodes {
		switch {
		case !other.Locator.IsValid():
			continue
		case other != n:
			// A SID is never on the link. The route to its locator has a next hop.
			via := other.IPv6
			if n == edge {
				via, _ = other.outside()
			}
			if err := addRoute(h, other.Locator, via); err != nil {
				return err
			}
		default:
			// A packet to a SID that this node does not know must not go back to the edge router.
			route := &netlink.Route{Dst: ipNet(n.Locator), Type: unix.RTN_BLACKHOLE}
			if err := h.RouteAdd(route); err != nil {
				return fmt.Errorf("add route blackhole %s: %w", n.Locator, err)
			}
		}
	}
	return nil
}

func addRoute(h *netlink.Handle, to netip.Prefix, via netip.Addr) error {
	if err := h.RouteAdd(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("add route %s via %s: %w", to, via, err)
	}
	return nil
}

// addLocalRoutes makes all addresses of the prefixes addresses of the node.
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
// balancers, by kernel ECMP with a hash of the 5-tuple. Flows keep their balancer as far as the
// kernel's hash-threshold algorithm permits (RFC 2992). Without balancers, the VIPs become
// unreachable.
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
		name := uplink
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
		route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{LinkIndex: link.Attrs().Index, Gw: gateway.AsSlice()})
	}
	return h.RouteReplace(route)
}

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
