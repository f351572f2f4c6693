// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/announce"
	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
)

// route is the route of a VIP or of an aggregate.
type route struct {
	prefix  netip.Prefix
	nextHop netip.Addr // zero: the balancer's address in the session
	attributes
}

// attributes are the attributes of a route that the configuration decides.
type attributes struct {
	prepend     uint32
	med         optional
	localPref   optional
	communities []desired.Community
}

// optional is an attribute that a route may lack.
type optional struct {
	value uint32
	isSet bool
}

// or returns the value that p points to, or o if p is nil.
func (o optional) or(p *uint32) optional {
	if p == nil {
		return o
	}
	return optional{*p, true}
}

// pointer returns a pointer to the value, or nil if it is not set.
func (o optional) pointer() *uint32 {
	if !o.isSet {
		return nil
	}
	return &o.value
}

// with returns attributes in which those of own have taken the place of others. The communities of
// own are added.
func (a attributes) with(own *desired.RouteAttributes) attributes {
	if own.Prepend != nil {
		a.prepend = *own.Prepend
	}
	a.med, a.localPref = a.med.or(own.MED), a.localPref.or(own.LocalPref)
	a.communities = slices.Concat(a.communities, own.Communities)
	slices.Sort(a.communities)
	a.communities = slices.Compact(a.communities)
	return a
}

// during returns the attributes of a route during a drain that makes routes less preferred. The
// route is prepended in addition to what it is otherwise.
func (a attributes) during(drain *desired.RouteAttributes) attributes {
	drained := a.with(drain)
	if drain.Prepend != nil {
		drained.prepend += a.prepend
	}
	return drained
}

func (r route) equals(other route) bool {
	return r.prefix == other.prefix && r.nextHop == other.nextHop && r.prepend == other.prepend &&
		r.med == other.med && r.localPref == other.localPref && slices.Equal(r.communities, other.communities)
}

// destination is a VIP of the configuration, or an aggregate with VIPs inside, that may be
// announced.
type destination struct {
	route
	service  announce.Service // the sum of the services
	hasPeer  bool             // at least one peer takes routes of the family
	services []string         // the services for which the route may be announced
}

// destinationsOf returns the destinations of all services that may be announced. If drain is not
// nil, the routes are those of a drained balancer.
func destinationsOf(
	b *desired.BGP, services []balancer.ServiceState, drain *desired.RouteAttributes,
) map[netip.Prefix]*destination {
	all := map[netip.Prefix]*destination{}
	for _, s := range services {
		if s.Service.Announcement() == desired.AnnounceNever {
			continue
		}
		for _, vip := range s.Service.AllVIPs() {
			addDestination(all, b, s, vip)
		}
	}
	if drain != nil {
		for _, d := range all {
			d.attributes = d.during(drain)
		}
	}
	return all
}

// addDestination makes a service a reason to announce one of its VIPs, and the aggregate that the VIP
// is in.
func addDestination(
	all map[netip.Prefix]*destination, b *desired.BGP, s balancer.ServiceState, vip netip.Addr,
) {
	if aggregate := b.AggregateOf(vip); aggregate != nil {
		d := all[aggregate.Prefix]
		if d == nil {
			d = newDestination(b, aggregate.Prefix)
			d.attributes = d.with(&aggregate.RouteAttributes)
			all[aggregate.Prefix] = d
		}
		d.add(s)
		if aggregate.SummaryOnly {
			return
		}
	}
	prefix := netip.PrefixFrom(vip, vip.BitLen())
	d := all[prefix]
	if d == nil {
		d = newDestination(b, prefix)
		all[prefix] = d
	}
	d.add(s)
	if s.Service.BGP != nil {
		d.attributes = d.with(&s.Service.BGP.RouteAttributes)
	}
}

// newDestination returns a destination without services. It has the attributes of all routes.
func newDestination(b *desired.BGP, prefix netip.Prefix) *destination {
	family := desired.FamilyOf(prefix.Addr())
	d := &destination{route: route{prefix: prefix, nextHop: b.NextHop(family)}, hasPeer: b.Announces(family)}
	d.attributes = d.with(&b.RouteAttributes)
	return d
}

// add makes a service a reason to announce the destination.
func (d *destination) add(s balancer.ServiceState) {
	if !slices.Contains(d.services, s.Service.Name) { // a service may have several VIPs in an aggregate
		d.services = append(d.services, s.Service.Name)
	}
	d.service = d.service.Or(announce.Of(s))
}
