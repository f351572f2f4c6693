// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestNeighboursOfLargeLab checks that the kernel of a large lab need not resolve the neighbours of
// servers and balancers, and that it resolves those of a small lab.
func TestNeighboursOfLargeLab(t *testing.T) {
	for _, c := range []struct {
		balancers, servers int
		permanent          bool
	}{{2, 2, false}, {16, 17, true}} {
		topology := bareTopology()
		topology.Balancers, topology.Servers = c.balancers, c.servers
		l := up(t, topology)
		for _, pair := range [][2]string{{"lb1", "s2"}, {"s2", "lb1"}, {"lb2", "s1"}} {
			if got := l.Node(pair[0]).hasPermanent(t, l.Node(pair[1]).IPv6); got != c.permanent {
				t.Errorf("%d balancers, %d servers: %s has %s as a permanent neighbour: %t",
					c.balancers, c.servers, pair[0], pair[1], got)
			}
		}
		testhost.Must(t, l.Down())
	}
}

// hasPermanent tells whether the node has the address as a permanent neighbour.
func (n *Node) hasPermanent(t *testing.T, address netip.Addr) (has bool) {
	t.Helper()
	err := n.netlink(func(h *netlink.Handle) error {
		list, err := h.NeighList(0, netlink.FAMILY_V6)
		for _, neighbour := range list {
			has = has || neighbour.IP.Equal(address.AsSlice()) && neighbour.State == netlink.NUD_PERMANENT
		}
		return err
	})
	testhost.Must(t, err)
	return has
}
