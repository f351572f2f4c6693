// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"net/netip"
	"slices"
	"time"

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
	isServed bool // at least one service can serve, so the route is to be announced
	// isUnchecked tells that a service has servers without a result of health checks yet.
	isUnchecked bool
	hasPeer     bool     // at least one peer takes routes of the family
	services    []string // the services for which the route may be announced
}

// destinationsOf returns the destinations of all services that may be announced. A destination is
// served as long as any of its services is served, because a withdrawal would end all of them. A
// service is served if it is Ready, or if it is Usable and its configuration permits to announce it
// in that state. If drain is not nil, the routes are those of a drained balancer.
func destinationsOf(
	b *desired.BGP, services []balancer.ServiceState, drain *desired.RouteAttributes,
) map[netip.Prefix]*destination {
	all := map[netip.Prefix]*destination{}
	for _, s := range services {
		announcement := s.Service.Announcement()
		if announcement == desired.AnnounceNever {
			continue
		}
		vip := s.Service.VIP
		aggregate := b.AggregateOf(vip)
		if aggregate != nil {
			d := all[aggregate.Prefix]
			if d == nil {
				d = newDestination(b, aggregate.Prefix)
				d.attributes = d.with(&aggregate.RouteAttributes)
				all[aggregate.Prefix] = d
			}
			d.add(s, announcement)
		}
		if aggregate != nil && aggregate.SummaryOnly {
			continue
		}
		prefix := netip.PrefixFrom(vip, vip.BitLen())
		d := all[prefix]
		if d == nil {
			d = newDestination(b, prefix)
			all[prefix] = d
		}
		d.add(s, announcement)
		if s.Service.BGP != nil {
			d.attributes = d.with(&s.Service.BGP.RouteAttributes)
		}
	}
	if drain != nil {
		for _, d := range all {
			d.attributes = d.during(drain)
		}
	}
	return all
}

// newDestination returns a destination without services. It has the attributes of all routes.
func newDestination(b *desired.BGP, prefix netip.Prefix) *destination {
	family := desired.FamilyOf(prefix.Addr())
	d := &destination{route: route{prefix: prefix, nextHop: b.NextHop(family)}, hasPeer: b.Announces(family)}
	d.attributes = d.with(&b.RouteAttributes)
	return d
}

// add makes a service a reason to announce the destination.
func (d *destination) add(s balancer.ServiceState, announcement desired.Announcement) {
	d.services = append(d.services, s.Service.Name)
	d.isServed = d.isServed || s.Ability == balancer.Ready ||
		s.Ability == balancer.Usable && announcement == desired.AnnounceUsable
	d.isUnchecked = d.isUnchecked || s.Ability == balancer.Unchecked
}

const (
	// mostDoublings is how often the hold-down time of a route can double.
	mostDoublings = 5
	// stableFactor is the number of hold-down times after which an announced route counts as
	// stable.
	stableFactor = 16
)

// damping decides how soon a route is announced again after a withdrawal: when the VIP has been
// served for the hold-down time without interruption. The hold-down time doubles with each
// withdrawal of a route that was not stable. The zero value is that of a route that was never
// withdrawn.
type damping struct {
	withdrawals int       // in a row: the route was not stable in between
	announced   time.Time // the time of the last announcement
	served      time.Time // since when the VIP is served without interruption; zero: it is not
}

// withdrawn notes that the route was withdrawn now, because the VIP is not served. If the route was
// stable until then, its withdrawals are counted anew.
func (d *damping) withdrawn(now time.Time, holdDown time.Duration) {
	if d.announced.IsZero() || now.Sub(d.announced) > stableFactor*holdDown {
		d.withdrawals = 0
	}
	d.withdrawals++
	d.served = time.Time{}
}

// due notes that the VIP is served now. It returns the time at which the route may be announced, if
// the VIP is served until then: now if the route was never withdrawn, and otherwise the later, the
// more often the route was withdrawn in a row.
func (d *damping) due(now time.Time, holdDown time.Duration) time.Time {
	if d.withdrawals == 0 {
		return now
	}
	if d.served.IsZero() {
		d.served = now
	}
	return d.served.Add(holdDown << min(d.withdrawals-1, mostDoublings))
}
