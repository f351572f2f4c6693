// SPDX-License-Identifier: Apache-2.0

package desired

import (
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/fieldpath"
)

// checkBGP checks the section bgp, and the fields bgp of services. all are the VIPs.
func (r *rules) checkBGP(b *Balancer, all vips) {
	for i := range b.Services {
		r.checkServiceBGP(fieldpath.Child(fieldpath.Item("services", i), "bgp"), b.Services[i].BGP, b.BGP)
	}
	if b.BGP == nil {
		return
	}
	switch id := b.BGP.RouterID; {
	case !id.IsValid():
		r.failf("bgp.router-id", "required")
	case !id.Is4() || id.IsUnspecified():
		r.failf("bgp.router-id", "must be an IPv4 address other than 0.0.0.0")
	}
	checkSeconds(r, "bgp.restart-time", b.BGP.RestartTime, time.Second, maxRestartTime)
	checkRange(r, "bgp.hold-down", b.BGP.HoldDown, 0, time.Hour)
	checkRange(r, "bgp.drain-delay", b.BGP.DrainDelay, 0, 10*time.Minute)
	r.checkCommunities("bgp.communities", b.BGP.Communities)
	r.checkNextHops(b.BGP.NextHops, all)
	if len(b.BGP.Peers) == 0 {
		r.failf("bgp.peers", "at least one is required")
	}
	seen := map[netip.Addr]string{}
	for i := range b.BGP.Peers {
		at := fieldpath.Item("bgp.peers", i)
		r.checkPeer(at, &b.BGP.Peers[i], b.BGP)
		checkUnique(r, seen, b.BGP.Peers[i].Address, fieldpath.Child(at, "address"))
		all.checkNotVIP(r, fieldpath.Child(at, "address"), b.BGP.Peers[i].Address)
	}
}

const (
	maxRestartTime = 4095 * time.Second  // 12 bits (RFC 4724, section 3)
	maxHoldTime    = 65535 * time.Second // 16 bits (RFC 4271, section 4.2)
)

// checkSeconds checks a duration that messages carry in seconds.
func checkSeconds(r *rules, path string, value, low, high time.Duration) {
	if value%time.Second != 0 {
		r.failf(path, "must be a whole number of seconds")
		return
	}
	checkRange(r, path, value, low, high)
}

// checkNextHops checks the next hops: there may be one of each family.
func (r *rules) checkNextHops(hops []netip.Addr, all vips) {
	first := map[Family]string{}
	for i, hop := range hops {
		at := fieldpath.Item("bgp.next-hops", i)
		r.checkAddress(at, hop)
		all.checkNotVIP(r, at, hop)
		if other, ok := first[FamilyOf(hop)]; ok {
			r.failf(at, "is a second %s address; the first is %s", family(hop), other)
		} else {
			first[FamilyOf(hop)] = at
		}
	}
}

// checkPeer checks a peer, apart from conflicts with other peers.
func (r *rules) checkPeer(path string, p *BGPPeer, b *BGP) {
	if !p.Address.IsValid() {
		r.failf(fieldpath.Child(path, "address"), "required")
		return
	}
	r.checkAddress(fieldpath.Child(path, "address"), p.Address)
	checkSeconds(r, fieldpath.Child(path, "hold-time"), p.HoldTime, 3*time.Second, maxHoldTime)
	if p.PasswordFile != "" && !filepath.IsAbs(p.PasswordFile) {
		r.failf(fieldpath.Child(path, "password-file"), "must be absolute")
	}
	if at := fieldpath.Child(path, "multihop"); p.Multihop != 0 {
		switch {
		case p.ASN == b.ASN:
			r.failf(at, "not used by an internal session: its packets may take any number of hops")
		case p.TTLSecurity:
			r.failf(at, "cannot be used with ttl-security, which excludes routers between the peers")
		}
	}
	at := fieldpath.Child(path, "families")
	if len(p.Families) == 0 {
		r.failf(at, "at least one is required")
	}
	seen := map[Family]string{}
	for i, family := range p.Families {
		checkKnown(r, fieldpath.Item(at, i), family, IPv4, IPv6)
		checkUnique(r, seen, family, fieldpath.Item(at, i))
		known := family == IPv4 || family == IPv6
		if known && family != FamilyOf(p.Address) && !b.NextHop(family).IsValid() {
			r.failf(fieldpath.Item(at, i), "needs an address of this family in bgp.next-hops, because the "+
				"session has none")
		}
	}
}

// checkServiceBGP checks the settings of a service's announcement.
func (r *rules) checkServiceBGP(path string, s *ServiceBGP, b *BGP) {
	if s == nil {
		return
	}
	if b == nil {
		r.failf(path, "not used without the section bgp of the file")
	}
	if s.Announce != "" {
		checkKnown(r, fieldpath.Child(path, "announce"), s.Announce, announcements...)
	}
	r.checkCommunities(fieldpath.Child(path, "communities"), s.Communities)
}

// checkCommunities checks the form of communities, and that none is given twice.
func (r *rules) checkCommunities(path string, all []Community) {
	seen := map[Community]string{}
	for i, c := range all {
		at := fieldpath.Item(path, i)
		_, isStandard := c.Standard()
		if _, isLarge := c.Large(); !isStandard && !isLarge {
			r.failf(at, "must be ASN:VALUE with numbers up to 65535, ASN:VALUE:VALUE with numbers up to "+
				"4294967295, or one of: %s", wellKnownNames())
		}
		checkUnique(r, seen, c, at)
	}
}

// wellKnownNames lists the well-known communities.
func wellKnownNames() string {
	names := []string{}
	for _, c := range slices.Sorted(maps.Keys(wellKnown)) {
		names = append(names, string(c))
	}
	return strings.Join(names, ", ")
}
