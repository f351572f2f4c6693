// SPDX-License-Identifier: Apache-2.0

// Package announce has the rules that all ways of announcing VIPs share: when a service is a reason
// to announce its VIP, how soon a VIP returns after it was given up, and how a drain of the
// balancer outlasts restarts.
package announce

import (
	"time"

	"github.com/segue-lb/segue/internal/balancer"
	"github.com/segue-lb/segue/internal/desired"
)

// Service tells whether a service is a reason to announce its VIP now.
type Service struct {
	IsServed bool // the service can serve
	// IsUnchecked tells that servers of the service have no result of health checks yet.
	IsUnchecked bool
}

// Of returns whether a service is a reason to announce its VIP. A service is served if it is Ready,
// or if it is Usable and its configuration permits to announce it in that state.
func Of(s balancer.ServiceState) Service {
	announcement := s.Service.Announcement()
	return Service{
		IsServed: s.Ability == balancer.Ready ||
			s.Ability == balancer.Usable && announcement == desired.AnnounceUsable,
		IsUnchecked: s.Ability == balancer.Unchecked,
	}
}

// Or returns the sum of two services of a VIP. A VIP is served as long as any of its services is
// served, because to give it up would end all of them.
func (s Service) Or(other Service) Service {
	return Service{s.IsServed || other.IsServed, s.IsUnchecked || other.IsUnchecked}
}

// MayBe tells whether the VIP is to be announced, if it was announced until now or not. While
// results of health checks are missing, it stays as it is.
func (s Service) MayBe(isAnnounced bool) bool {
	return s.IsServed || s.IsUnchecked && isAnnounced
}

const (
	// mostDoublings is how often the hold-down time of a VIP can double.
	mostDoublings = 5
	// stableFactor is the number of hold-down times after which an announced VIP counts as stable.
	stableFactor = 16
)

// Damping decides how soon a VIP is announced again after it was given up: when it has been served
// for the hold-down time without interruption. The hold-down time doubles each time that a VIP is
// given up that was not stable. The zero value is that of a VIP that was never given up.
type Damping struct {
	withdrawals int       // in a row: the VIP was not stable in between
	announced   time.Time // the time of the last announcement
	served      time.Time // since when the VIP is served without interruption; zero: it is not
}

// Announced notes that the VIP is announced from now on.
func (d *Damping) Announced(now time.Time) { d.announced = now }

// Withdrawn notes that the VIP was given up now, because it is not served. If it was stable until
// then, the withdrawals are counted anew.
func (d *Damping) Withdrawn(now time.Time, holdDown time.Duration) {
	if d.announced.IsZero() || now.Sub(d.announced) > stableFactor*holdDown {
		d.withdrawals = 0
	}
	d.withdrawals++
	d.Unserved()
}

// Unserved notes that the VIP is not served, so that a hold-down time begins anew.
func (d *Damping) Unserved() { d.served = time.Time{} }

// Due notes that the VIP is served now. It returns the time at which the VIP may be announced, if
// it is served until then: now if it was never given up, and otherwise the later, the more often it
// was given up in a row.
func (d *Damping) Due(now time.Time, holdDown time.Duration) time.Time {
	if d.withdrawals == 0 {
		return now
	}
	if d.served.IsZero() {
		d.served = now
	}
	return d.served.Add(holdDown << min(d.withdrawals-1, mostDoublings))
}
