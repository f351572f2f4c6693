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
	r.checkSameRoute(b.Services)
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
	r.checkAttributes("bgp", &b.BGP.RouteAttributes, b.BGP)
	r.checkAggregates(b.BGP)
	r.checkDrain(b.BGP)
	r.checkNextHops(b.BGP.NextHops, all)
	r.checkBGPPeers(b.BGP, all)
}

// checkAggregates checks the prefixes of aggregates, and their attributes.
func (r *rules) checkAggregates(b *BGP) {
	for i := range b.Aggregates {
		path := fieldpath.Item("bgp.aggregates", i)
		r.checkAttributes(path, &b.Aggregates[i].RouteAttributes, b)
		at, prefix := fieldpath.Child(path, "prefix"), b.Aggregates[i].Prefix
		switch address := prefix.Addr(); {
		case !prefix.IsValid():
			r.failf(at, "required")
			continue
		case prefix != prefix.Masked():
			r.failf(at, "has bits set after the first %d; write it as %s", prefix.Bits(), prefix.Masked())
		case prefix.Bits() == 0:
			r.failf(at, "has all addresses, and would attract all packets of routers")
		case prefix.IsSingleIP():
			r.failf(at, "is one address; a VIP needs no aggregate")
		case address.Is4In6() || address.IsMulticast() || address.Is6() && address.IsLinkLocalUnicast():
			r.failf(at, "must be a prefix of unicast addresses that other hosts can reach")
		}
		for j := range i {
			if other := b.Aggregates[j].Prefix; other.Overlaps(prefix) {
				first := fieldpath.Child(fieldpath.Item("bgp.aggregates", j), "prefix")
				r.conflict(at, first, "overlaps %s of", other)
				break
			}
		}
	}
}

// checkDrain checks the attributes of a drain.
func (r *rules) checkDrain(b *BGP) {
	d := b.Drain
	if d == nil {
		return
	}
	r.checkAttributes("bgp.drain", d, nil)
	if (d.Prepend == nil || *d.Prepend == 0) && d.MED == nil && d.LocalPref == nil && len(d.Communities) == 0 {
		r.failf("bgp.drain", "changes no route; set prepend, med, local-pref or communities, or leave it out to "+
			"withdraw the routes")
	}
	r.checkUse("bgp.drain", d, b)
	if d.MED != nil && *d.MED == 0 {
		r.failf("bgp.drain.med", "must be at least 1: routers prefer the lowest")
	}
	if d.LocalPref != nil && b.LocalPref == nil && *d.LocalPref >= DefaultLocalPref {
		r.failf("bgp.drain.local-pref", "must be less than %d, which is that of routes without local-pref: routers "+
			"prefer the highest", DefaultLocalPref)
	}
}

// checkAttributes checks the attributes of routes at a path. b is the section bgp; nil: only the
// values themselves are checked.
func (r *rules) checkAttributes(path string, a *RouteAttributes, b *BGP) {
	r.checkCommunities(fieldpath.Child(path, "communities"), a.Communities)
	if b == nil {
		return
	}
	r.checkUse(path, a, b)
	if b.Drain == nil {
		return
	}
	if d := b.Drain.MED; d != nil && *d > 0 && a.MED != nil && *a.MED >= *d {
		r.failf(fieldpath.Child(path, "med"), "must be less than bgp.drain.med, %d: routers prefer the lowest, and "+
			"would not leave a drained balancer", *d)
	}
	if d := b.Drain.LocalPref; d != nil && a.LocalPref != nil && *a.LocalPref <= *d {
		r.failf(fieldpath.Child(path, "local-pref"), "must be more than bgp.drain.local-pref, %d: routers prefer the "+
			"highest, and would not leave a drained balancer", *d)
	}
}

// checkUse reports attributes that the kinds of sessions exclude. In an internal session, a router
// refuses a route with its own autonomous system in the path. An external session has no
// LOCAL_PREF.
func (r *rules) checkUse(path string, a *RouteAttributes, b *BGP) {
	internal := slices.IndexFunc(b.Peers, func(p BGPPeer) bool { return p.ASN == b.ASN })
	if a.Prepend != nil && *a.Prepend > 0 && internal >= 0 {
		r.failf(fieldpath.Child(path, "prepend"), "cannot be used with an internal session, such as that of %s: the "+
			"router would refuse the route; use local-pref", fieldpath.Item("bgp.peers", internal))
	}
	if a.LocalPref != nil && internal < 0 && len(b.Peers) > 0 {
		r.failf(fieldpath.Child(path, "local-pref"), "needs an internal session, and all peers have other autonomous "+
			"systems; use prepend or med")
	}
}

// checkBGPPeers checks all peers, and conflicts between them.
func (r *rules) checkBGPPeers(b *BGP, all vips) {
	if len(b.Peers) == 0 {
		r.failf("bgp.peers", "at least one is required")
	}
	seen, links := map[netip.Addr]string{}, map[string]string{}
	for i := range b.Peers {
		path, p := fieldpath.Item("bgp.peers", i), &b.Peers[i]
		at, link := fieldpath.Child(path, "address"), fieldpath.Child(path, "interface")
		r.checkPeer(path, p, b)
		all.checkNotVIP(r, at, p.Address)
		if p.Interface == "" {
			checkUnique(r, seen, p.Address, at)
			continue
		}
		checkUnique(r, seen, p.Address.WithZone(p.Interface), at)
		for _, other := range b.Peers[:i] {
			if other.Interface == p.Interface && !(p.Address.IsValid() && other.Address.IsValid()) {
				r.conflict(link, links[p.Interface], "needs an address to have several peers; the interface is "+
					"already used by")
				break
			}
		}
		if _, ok := links[p.Interface]; !ok {
			links[p.Interface] = link
		}
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
	if !p.Address.IsValid() && p.Interface == "" {
		r.failf(fieldpath.Child(path, "address"), "required, unless interface is the link to an unnumbered peer")
		return
	}
	r.checkPeerAddress(path, p)
	checkSeconds(r, fieldpath.Child(path, "hold-time"), p.HoldTime, 3*time.Second, maxHoldTime)
	if p.PasswordFile != "" && !filepath.IsAbs(p.PasswordFile) {
		r.failf(fieldpath.Child(path, "password-file"), "must be absolute")
	}
	if at := fieldpath.Child(path, "multihop"); p.Multihop != 0 {
		switch {
		case p.Interface != "":
			r.failf(at, "cannot be used with interface: link-local addresses reach no further than the link")
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
		if family == IPv6 && !p.hasIPv6() && !b.NextHop(family).IsValid() {
			r.failf(fieldpath.Item(at, i), "needs an address of this family in bgp.next-hops, because the "+
				"session has none")
		}
	}
}

// checkPeerAddress checks the fields address and interface of a peer.
func (r *rules) checkPeerAddress(path string, p *BGPPeer) {
	at := fieldpath.Child(path, "address")
	isLinkLocal := p.Address.Is6() && p.Address.IsLinkLocalUnicast()
	switch {
	case p.Interface == "" && isLinkLocal:
		r.failf(at, "is link-local: interface must name its link")
	case p.Interface == "":
		r.checkAddress(at, p.Address)
	case p.Address.Zone() != "":
		r.failf(at, "must not have a zone: interface names the link")
	case p.Address.IsValid() && !isLinkLocal:
		r.failf(at, "must be an IPv6 link-local address, because the peer has an interface")
	}
	if p.Interface != "" {
		r.checkInterface(fieldpath.Child(path, "interface"), p.Interface)
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
	r.checkAttributes(path, &s.RouteAttributes, b)
}

// checkSameRoute reports services of one VIP that give its route different attributes. Communities
// are added, so they cannot conflict.
func (r *rules) checkSameRoute(services []Service) {
	type attribute struct {
		vip  netip.Addr
		name string
	}
	type given struct {
		value uint32
		path  string
	}
	first := map[attribute]given{}
	for i := range services {
		s := &services[i]
		if s.BGP == nil || s.Announcement() == AnnounceNever {
			continue
		}
		path := fieldpath.Child(fieldpath.Item("services", i), "bgp")
		for _, a := range []struct {
			name  string
			value *uint32
		}{{"prepend", s.BGP.Prepend}, {"med", s.BGP.MED}, {"local-pref", s.BGP.LocalPref}} {
			if a.value == nil {
				continue
			}
			now := given{*a.value, fieldpath.Child(path, a.name)}
			for _, vip := range s.AllVIPs() {
				key := attribute{vip, a.name}
				if was, ok := first[key]; !ok {
					first[key] = now
				} else if was.value != now.value {
					r.conflict(now.path, was.path, "%d: VIP %s has one route, and its value is already %d by", now.value,
						vip, was.value)
				}
			}
		}
	}
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
