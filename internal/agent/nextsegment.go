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

// NextSegment is the route of the kernel to the next server of a segment list.
type NextSegment struct {
	SID netip.Addr `json:"sid"`
	// Problem says why packets for the next server are lost. It is empty if no problem is known.
	Problem string `json:"problem,omitempty"`
}

// FindNext looks up the route from the instance's interface to the SID of another server. The
// programs cannot find it themselves: they hand the packet to the kernel before the kernel looks
// for a route (bpf/agent/next_segment.h).
func (v *View) FindNext(sid netip.Addr) (*NextSegment, error) {
	ifindex, err := datapath.AttachedTo(filepath.Join(datapath.Dir(v.instance), datapath.LinkPin))
	if err != nil {
		return nil, err
	}
	next := &NextSegment{SID: sid}
	next.Problem, err = whyUnreachable(ifindex, sid)
	return next, err
}

// whyUnreachable returns an empty string if it finds no problem on the path through the interface.
func whyUnreachable(ifindex int, sid netip.Addr) (string, error) {
	if ifindex == 0 {
		return "the agent is not attached", nil
	}
	routes, err := netlink.RouteGetWithOptions(sid.AsSlice(), &netlink.RouteGetOptions{OifIndex: ifindex})
	if err != nil || len(routes) == 0 {
		return fmt.Sprintf("no route to %s: %v", sid, err), nil
	}
	hop := sid
	if gateway, ok := netip.AddrFromSlice(routes[0].Gw); ok {
		hop = gateway
	}
	neighbours, err := netlink.NeighList(ifindex, netlink.FAMILY_V6)
	if err != nil {
		return "", fmt.Errorf("list the neighbours: %w", err)
	}
	for _, n := range neighbours {
		if n.IP.Equal(hop.AsSlice()) && n.State&(unix.NUD_FAILED|unix.NUD_INCOMPLETE) != 0 {
			return fmt.Sprintf("the route to %s leads to %s, which does not answer", sid, hop), nil
		}
	}
	return "", nil
}
