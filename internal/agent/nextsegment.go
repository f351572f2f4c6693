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

// NextSegment is the way to the next server of a list, as the kernel finds it for what is passed on.
type NextSegment struct {
	SID netip.Addr `json:"sid"`
	// Problem is why what is passed on is lost; empty: nothing is known that it would be for.
	Problem string `json:"problem,omitempty"`
}

// FindNext looks up the way from the instance's interface to the SID of another server. The programs hand a
// packet to the kernel before it looks for a route (bpf/agent/next_segment.h), and so cannot tell.
func (v *View) FindNext(sid netip.Addr) (*NextSegment, error) {
	ifindex, err := datapath.AttachedTo(filepath.Join(datapath.Dir(v.instance), datapath.LinkPin))
	if err != nil {
		return nil, err
	}
	next := &NextSegment{SID: sid}
	next.Problem, err = whyUnreachable(ifindex, sid)
	return next, err
}

// whyUnreachable is empty where nothing is known against a way by an interface.
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
