// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/segue-lb/segue/internal/netdev"
)

// buildLinks makes the fabric's bridge and all cables, which are pairs of veths. One cable connects
// client and edge router. One connects each other node to the fabric, except that a balancer may
// stand behind a switch. A balancer with two arms has a second cable, to the edge router.
func (l *Lab) buildLinks() error {
	fabric, edge, client := l.Node("fabric"), l.Node("edge"), l.Node("client")
	snooping := false
	br := &netlink.Bridge{
		LinkAttrs: netlink.LinkAttrs{Name: bridge, MTU: l.Topology.MTU.Fabric},
		// A bridge with snooping learns the members of multicast groups from the answers to a
		// querier. The lab has no querier. So this bridge would not forward neighbour
		// solicitations.
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
		if !n.onFabric() {
			continue
		}
		if err := n.connectTo(fabric); err != nil {
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
	// Connect the client last, so that the two ends have different interface numbers in their
	// namespaces: the edge router has other interfaces by now. If a veth has the same number as its
	// peer, the kernel treats it like hardware, and may wait up to a second until it reports the
	// link as up.
	if err := connect(edge, downlink, client, uplink, l.Topology.MTU.Client); err != nil {
		return err
	}
	return edge.forgetHashes()
}

// connectTo connects the node with the fabric, through its switch if it has one.
func (n *Node) connectTo(fabric *Node) error {
	mtu, sw := n.lab.Topology.MTU.Fabric, n.switchInFront()
	if sw == nil {
		return connect(fabric, n.Name, n, uplink, mtu)
	}
	err := errors.Join(connect(fabric, n.Name, sw, switchPort(networkPort), mtu),
		connect(sw, switchPort(hostPort), n, uplink, mtu))
	if err != nil {
		return err
	}
	// The switch sends frames on as they are. So the balancer's kernel must complete its packets, as
	// the fabric's port does (prepareForXDP).
	if err := n.Do(func() error { return netdev.SetOffloads(uplink, false, netdev.Checksum) }); err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	if err := sw.Do(func() error { return prepareForXDP(switchPort(hostPort), n.Role) }); err != nil {
		return fmt.Errorf("%s: %w", sw.Name, err)
	}
	return nil
}

// forgetHashes attaches a program to the edge router's downlink that removes the hash which the
// sender's kernel has stored with a packet (wire.bpf.c). So the edge router computes its own ECMP
// hash, from the 5-tuple alone.
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

// connect makes a pair of veths between two nodes. nameA is the name of the interface on node a,
// and nameB the name of the interface on node b.
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

// plugIn adds the fabric's end of a node's cable to the fabric's bridge. If the node may run XDP,
// plugIn first prepares the fabric's end for that. Otherwise, as with proxies, veths keep their
// offloads.
func (fabric *Node) plugIn(node *Node, br netlink.Link) error {
	mayRunXDP := !node.lab.Topology.hasProxies()
	if mayRunXDP && (node.Role == RoleBalancer || node.Role == RoleServer) {
		if err := fabric.Do(func() error { return prepareForXDP(node.Name, node.Role) }); err != nil {
			return err
		}
	}
	return fabric.netlink(func(h *netlink.Handle) error {
		port, err := h.LinkByName(node.Name)
		if err != nil {
			return err
		}
		// Impair needs clsact. The kernel drops packets while it adds clsact, so add it now, before
		// there are packets.
		if err := addClsact(h, port); err != nil {
			return err
		}
		if err := h.LinkSetMaster(port, br); err != nil {
			return err
		}
		return h.LinkSetUp(port)
	})
}
