// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"net/netip"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/datapath"
)

// NextSegment is the kernel's route to the next server of a segment list.
type NextSegment struct {
	SID netip.Addr `json:"sid"`
	// Router is the next hop of the default route, if packets take that route. The packets then
	// reach the server only if the router has a route to it.
	Router *netip.Addr `json:"default_router,omitempty"`
	// Problem says why packets for the next server are lost. It is empty if no problem is known.
	Problem string `json:"problem,omitempty"`
}

// FindNext looks up the route from the instance's interface to the SID of another server. A dry run
// cannot tell the route: the program hands the packet to the kernel, which then looks for it
// (bpf/agent/next_segment.h).
func (v *View) FindNext(sid netip.Addr) (*NextSegment, error) {
	ifindex, err := datapath.AttachedTo(filepath.Join(datapath.Dir(v.instance), datapath.LinkPin))
	if err != nil {
		return nil, err
	}
	next := &NextSegment{SID: sid}
	return next, next.find(ifindex)
}

// find looks up the route through the interface, and sets Router and Problem. Problem stays empty
// if the kernel does not know the neighbour yet: when a packet comes, the kernel asks the neighbour
// for its MAC address.
func (n *NextSegment) find(ifindex int) error {
	if ifindex == 0 {
		n.Problem = "the agent is not attached"
		return nil
	}
	options := &netlink.RouteGetOptions{OifIndex: ifindex, FIBMatch: true} // with the prefix
	routes, err := netlink.RouteGetWithOptions(n.SID.AsSlice(), options)
	if err != nil || len(routes) == 0 {
		n.Problem = fmt.Sprintf("no route to %s (%v)", n.SID, err)
		return nil
	}
	hop := n.SID
	if gateway, ok := netip.AddrFromSlice(routes[0].Gw); ok {
		hop = gateway
		if isDefault(&routes[0]) {
			n.Router = &gateway
		}
	}
	neighbours, err := netlink.NeighList(ifindex, netlink.FAMILY_V6)
	if err != nil {
		return fmt.Errorf("list the neighbours: %w", err)
	}
	for _, neighbour := range neighbours {
		if neighbour.IP.Equal(hop.AsSlice()) &&
			neighbour.State&(unix.NUD_FAILED|unix.NUD_INCOMPLETE) != 0 {
			n.Problem = fmt.Sprintf("the route to %s leads to %s, which does not answer", n.SID, hop)
		}
	}
	return nil
}

// isDefault tells whether the route is a default route: it has no prefix, or one of length 0.
func isDefault(route *netlink.Route) bool {
	if route.Dst == nil {
		return true
	}
	length, _ := route.Dst.Mask.Size()
	return length == 0
}
