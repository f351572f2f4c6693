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

// vip is a VIP of the configuration, with what its services can do.
type vip struct {
	route
	isServed bool // at least one service is a reason to announce it
	// isUnchecked tells that health checks are yet to tell whether a service is such a reason.
	isUnchecked bool
	hasPeer     bool     // at least one peer takes routes of its family
	services    []string // that may be a reason
}

// vipsOf returns the VIPs of the services, without those that no service may announce. A VIP is
// served as long as any of its services is: a withdrawal would end the others, too.
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
	// mostDoublings bounds the time for which a route that comes and goes is held down.
	mostDoublings = 5
	// stableFactor is how many hold-down times a route must have stood to be taken for stable.
	stableFactor = 16
)

// damping decides how soon a route returns after a withdrawal. The zero value is that of a route
// that was never withdrawn.
type damping struct {
	withdrawals int       // in a row, each soon after the announcement before
	announced   time.Time // the last time
	served      time.Time // since when the VIP is served without interruption; zero: it is not
}

// withdrawn notes that the route was withdrawn because the VIP is not served.
func (d *damping) withdrawn(now time.Time, holdDown time.Duration) {
	if d.announced.IsZero() || now.Sub(d.announced) > stableFactor*holdDown {
		d.withdrawals = 0
	}
	d.withdrawals++
	d.served = time.Time{}
}

// due returns when a VIP may be announced that is served now.
func (d *damping) due(now time.Time, holdDown time.Duration) time.Time {
	if d.withdrawals == 0 {
		return now
	}
	if d.served.IsZero() {
		d.served = now
	}
	return d.served.Add(holdDown << min(d.withdrawals-1, mostDoublings))
}
