// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
)

// resolvable is the number of neighbours that the lab leaves to the kernel to resolve. All
// namespaces together may have 1024 (net.ipv6.neigh.default.gc_thresh3), and the link-local address
// of a neighbour counts as another one. Beyond that number the kernel drops packets. Permanent
// neighbours do not count.
const resolvable = 512

// addNeighbours adds permanent neighbours on servers and balancers, if there are too many of them
// for the kernel to resolve. Servers send signals to balancers, and pass connections on to each other.
func (l *Lab) addNeighbours() error {
	servers, balancers := l.Topology.specs(RoleServer), l.Topology.specs(RoleBalancer)
	hunts := slices.ContainsFunc(l.Topology.Services, Service.hunts)
	neighbours := 2 * len(servers) * len(balancers)
	if hunts {
		neighbours += len(servers) * len(servers)
	}
	if neighbours <= resolvable {
		return nil
	}
	macs := make(map[string]net.HardwareAddr)
	for _, spec := range slices.Concat(servers, balancers) {
		mac, err := l.Node(spec.Name).mac()
		if err != nil {
			return fmt.Errorf("%s: %s: %w", spec.Name, uplink, err)
		}
		macs[spec.Name] = mac
	}
	for _, spec := range servers {
		others := balancers
		if hunts {
			others = slices.Concat(balancers, servers)
		}
		if err := l.Node(spec.Name).addNeighbours(others, macs); err != nil {
			return err
		}
	}
	for _, spec := range balancers {
		if err := l.Node(spec.Name).addNeighbours(servers, macs); err != nil {
			return err
		}
	}
	return nil
}

// mac returns the address of the node's link to the fabric.
func (n *Node) mac() (mac net.HardwareAddr, err error) {
	err = n.netlink(func(h *netlink.Handle) error {
		link, err := h.LinkByName(uplink)
		if err == nil {
			mac = link.Attrs().HardwareAddr
		}
		return err
	})
	return mac, err
}

// addNeighbours adds the other nodes of a list as permanent neighbours. The map has the addresses
// of their links, by name.
func (n *Node) addNeighbours(others []Spec, macs map[string]net.HardwareAddr) error {
	err := n.netlink(func(h *netlink.Handle) error {
		link, err := h.LinkByName(uplink)
		for _, other := range others {
			if other.Name == n.Name || err != nil {
				continue
			}
			err = h.NeighAdd(&netlink.Neigh{
				LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
				IP: other.IPv6.AsSlice(), HardwareAddr: macs[other.Name],
			})
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: add neighbours: %w", n.Name, err)
	}
	return nil
}
