// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"net/netip"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
)

// route is the route of a VIP.
type route struct {
	vip         netip.Addr
	nextHop     netip.Addr // zero: the balancer's address in the session
	communities []desired.Community
}

// prefix returns the /32 or /128 of the VIP.
func (r route) prefix() netip.Prefix { return netip.PrefixFrom(r.vip, r.vip.BitLen()) }

func (r route) equals(other route) bool {
	return r.vip == other.vip && r.nextHop == other.nextHop && slices.Equal(r.communities, other.communities)
}

// vip is a VIP of the configuration that may be announced.
type vip struct {
	route
	isServed bool // at least one service can serve, so the VIP is to be announced
	// isUnchecked tells that a service has servers without a result of health checks yet.
	isUnchecked bool
	hasPeer     bool     // at least one peer takes routes of the VIP's family
	services    []string // the services for which the VIP may be announced
}

// vipsOf returns the VIPs of all services that may be announced. A VIP is served as long as any of
// its services is served, because a withdrawal would end all of them. A service is served if it is
// Ready, or if it is Usable and its configuration permits to announce it in that state. A VIP has
// the communities of the balancer and of all its services.
func vipsOf(b *desired.BGP, services []balancer.ServiceState) map[netip.Addr]*vip {
	vips := map[netip.Addr]*vip{}
	for _, s := range services {
		announcement := s.Service.Announcement()
		if announcement == desired.AnnounceNever {
			continue
		}
		address := s.Service.VIP
		v := vips[address]
		if v == nil {
			family := desired.FamilyOf(address)
			v = &vip{route: route{
				vip: address, nextHop: b.NextHop(family), communities: slices.Clone(b.Communities),
			}, hasPeer: b.Announces(family)}
			vips[address] = v
		}
		v.services = append(v.services, s.Service.Name)
		v.isServed = v.isServed || s.Ability == balancer.Ready ||
			s.Ability == balancer.Usable && announcement == desired.AnnounceUsable
		v.isUnchecked = v.isUnchecked || s.Ability == balancer.Unchecked
		if s.Service.BGP != nil {
			v.communities = append(v.communities, s.Service.BGP.Communities...)
		}
	}
	for _, v := range vips {
		slices.Sort(v.communities)
		v.communities = slices.Compact(v.communities)
	}
	return vips
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
