// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
)

// resolvable is the largest number of neighbours that the lab leaves to the kernel to resolve. All
// namespaces of the machine together can have 1024 entries (net.ipv6.neigh.default.gc_thresh3), and
// a neighbour may need two: one for its link-local address. With more entries, the kernel drops
// packets. Permanent entries do not count.
const resolvable = 512

// addNeighbours adds permanent neighbour entries on servers and balancers, if they have more
// neighbours in total than resolvable. Each server needs an entry for each balancer, and each
// balancer one for each server. If a service has placement hunt, each server also needs an entry
// for each other server, to which it passes connections on.
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

// mac returns the Ethernet address of the node's uplink.
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

// addNeighbours adds permanent entries for the addresses by which packets go to the neighbours,
// except for the node itself. They are IPv6, unless the fabric has none. macs has the Ethernet address of each neighbour, by name.
func (n *Node) addNeighbours(neighbours []Spec, macs map[string]net.HardwareAddr) error {
	err := n.netlink(func(h *netlink.Handle) error {
		link, err := h.LinkByName(uplink)
		if err != nil {
			return err
		}
		for _, neighbour := range neighbours {
			if neighbour.Name == n.Name {
				continue
			}
			err := h.NeighAdd(&netlink.Neigh{
				LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
				IP: neighbour.addresses()[0].AsSlice(), HardwareAddr: macs[neighbour.Name],
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("%s: add neighbours: %w", n.Name, err)
	}
	return nil
}
