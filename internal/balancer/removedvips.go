// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/nexthop"
)

// removedVIPs returns the entries of the VIPs that have an entry before a change, but have no
// service after it, the last removed ones first. VIPs that were removed earlier are among them.
// removedVIPs leaves out those that are forgotten, and the oldest ones if the tables have no room
// for all. The function hasService tells whether a VIP has a service after the change.
func (s *services) removedVIPs(
	before []dataplane.ServiceEntry, hasService func(vip dataplane.ServiceEntry) bool,
) (removed []dataplane.ServiceEntry, err error) {
	now, err := dataplane.BootTime()
	if err != nil {
		return nil, err
	}
	for _, entry := range before {
		if entry.IsService() || hasService(entry.Key()) {
			continue
		}
		if entry = entry.Remove(now); !s.isForgotten(entry, now) {
			removed = append(removed, entry)
		}
	}
	// The Id of a removed VIP is the time of its removal.
	slices.SortFunc(removed, func(a, b dataplane.ServiceEntry) int { return cmp.Compare(b.Id, a.Id) })
	return removed[:min(len(removed), dataplane.MaxRemovedVIPs)], nil
}

// isForgotten tells whether packets to a removed VIP pass to the host again: routers have had the
// time dropRemoved to stop sending them, or the address is now the host's own.
func (s *services) isForgotten(vip dataplane.ServiceEntry, now time.Duration) bool {
	at, _ := vip.Removed()
	return now-at >= s.dropRemoved || nexthop.IsOwn(vip.VIP())
}

// forgetVIPs removes the entries of the removed VIPs for which isForgotten returns true.
func (s *services) forgetVIPs() error {
	if s.removed == 0 {
		return nil
	}
	now, err := dataplane.BootTime()
	if err != nil {
		return err
	}
	before := s.plane.Services.All()
	kept := slices.DeleteFunc(slices.Clone(before), func(e dataplane.ServiceEntry) bool {
		_, removed := e.Removed()
		return removed && s.isForgotten(e, now)
	})
	if len(kept) == len(before) {
		return nil
	}
	if err := s.replaceEntries(kept); err != nil {
		return fmt.Errorf("forget removed VIPs: %w", err)
	}
	s.removed -= len(before) - len(kept)
	return nil
}

// replaceEntries replaces all entries of the table of services.
func (s *services) replaceEntries(entries []dataplane.ServiceEntry) error {
	if err := s.plane.CountRemoved(entries); err != nil {
		return err
	}
	if err := s.plane.Services.Replace(entries, s.plane.Settle); err != nil {
		return err
	}
	return s.plane.UncountRemoved(entries)
}
