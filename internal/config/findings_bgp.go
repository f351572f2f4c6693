// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

const (
	// shortestHoldTime lets a busy router or balancer send no keepalives for some seconds.
	shortestHoldTime = 6 * time.Second
	// longestHoldTime is the longest time for which a router should still send packets to a dead host.
	longestHoldTime = 30 * time.Second
	// shortestRestartTime is twice the longest time until a session returns (docs/operate/bgp.md).
	shortestRestartTime = time.Minute
)

// eachPeer makes a rule for balancers of a rule for BGP peers: it calls find for each peer.
func eachPeer(
	find func(i *inspection, path string, p *desired.BGPPeer),
) func(*inspection, *desired.Balancer) {
	return func(i *inspection, b *desired.Balancer) {
		if b.BGP == nil {
			return
		}
		for n := range b.BGP.Peers {
			find(i, fieldpath.Item("bgp.peers", n), &b.BGP.Peers[n])
		}
	}
}

// noPassword finds a peer without a password.
func (i *inspection) noPassword(path string, p *desired.BGPPeer) {
	if p.PasswordFile != "" {
		return
	}
	who := "any host that reaches this one"
	if p.TTLSecurity {
		who = "any host on the link"
	}
	i.findf(fieldpath.Child(path, "password-file"), "missing: %s can forge packets of the router, and end the session; "+
		"set the same password on both sides", who)
}

// holdTime finds a peer whose hold time is too short or too long.
func (i *inspection) holdTime(path string, p *desired.BGPPeer) {
	at := fieldpath.Child(path, "hold-time")
	switch {
	case p.HoldTime < shortestHoldTime:
		i.findf(at, "%s: when a router or this host is busy for so long, the router removes the routes; set at "+
			"least %s, and use BFD to find dead hosts faster", p.HoldTime, shortestHoldTime)
	case p.HoldTime > longestHoldTime:
		i.findf(at, "%s: for so long, a router sends packets to a balancer that is dead; set at most %s",
			p.HoldTime, longestHoldTime)
	}
}

// shortRestartTime finds a restart time in which a balancer may not be able to restart.
func (i *inspection) shortRestartTime(b *desired.Balancer) {
	if b.BGP != nil && b.BGP.RestartTime < shortestRestartTime {
		i.findf("bgp.restart-time", "%s: when a start takes longer, routers remove the routes during an upgrade; set "+
			"at least %s", b.BGP.RestartTime, shortestRestartTime)
	}
}

// onePeer finds families of addresses whose routes only one router gets.
func (i *inspection) onePeer(b *desired.Balancer) {
	if b.BGP == nil {
		return
	}
	for _, family := range []desired.Family{desired.IPv4, desired.IPv6} {
		peers := 0
		for _, p := range b.BGP.Peers {
			if slices.Contains(p.Families, family) {
				peers++
			}
		}
		if peers == 1 {
			i.findf("bgp.peers", "only one has the family %s: if this router or the session to it fails, the balancer "+
				"loses all traffic of the family; add another router", family)
		}
	}
}

// harmfulCommunities finds communities that keep traffic away from all VIPs.
func (i *inspection) harmfulCommunities(b *desired.Balancer) {
	if b.BGP == nil {
		return
	}
	harms := map[desired.Community]string{
		"blackhole":         "routers drop the packets to all VIPs (RFC 7999)",
		"graceful-shutdown": "routers prefer all other routes to the VIPs (RFC 8326)",
	}
	for n, c := range b.BGP.Communities {
		if harm, ok := harms[c]; ok {
			i.findf(fieldpath.Item("bgp.communities", n), "%s; to take this balancer out of service, use `segue drain --self`",
				harm)
		}
	}
}

// uselessUsable finds services with announce: usable and all-failed: refuse. If all servers fail
// their checks, their routes are withdrawn all the same, as with announce: ready.
func (i *inspection) uselessUsable(path string, s *desired.Service) {
	if s.Announcement() == desired.AnnounceUsable && s.AllFailed == desired.AllFailedRefuse {
		i.findf(fieldpath.Child(path, "bgp.announce"), "usable does not keep the route when all servers fail their "+
			"checks, because all-failed is refuse; set all-failed to use, or announce to ready")
	}
}
