// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health"
	"github.com/segue-lb/segue/internal/health/probe"
)

// serviceDiff contains the services in which two desired states differ. A change looks at no
// others, so its cost depends only on what changes.
type serviceDiff struct {
	before, after map[string]*desired.Service // services that differ, by name; nil: there is none
}

// diffOf compares the services of two desired states.
func diffOf(before, after []desired.Service) *serviceDiff {
	d := &serviceDiff{map[string]*desired.Service{}, map[string]*desired.Service{}}
	changed, former := desired.Differing(after, before)
	for _, s := range changed {
		d.after[s.Name] = s
	}
	for _, s := range former {
		d.before[s.Name] = s
	}
	return d
}

// has tells whether a service is new, or was changed or removed.
func (d *serviceDiff) has(name string) bool { return d.before[name] != nil || d.after[name] != nil }

// addsTargets tells whether there may be new targets of next hops.
func (d *serviceDiff) addsTargets() bool {
	for name, now := range d.after {
		known := map[netip.Addr]bool{}
		if was := d.before[name]; was != nil {
			for i := range was.Servers {
				known[target(&was.Servers[i])] = true
			}
		}
		isNew := func(s desired.Server) bool { return !known[target(&s)] }
		if slices.ContainsFunc(now.Servers, isNew) {
			return true
		}
	}
	return false
}

// watched is what the resolver, the checker and the prober know of services.
type watched struct {
	paths   map[string]dataplane.Check // how checks are encapsulated, by service
	targets map[netip.Addr]bool
	checks  []health.Target // without the results
	probes  []probe.Target  // without the findings
}

func (w *watched) equals(other *watched) bool { return reflect.DeepEqual(w, other) }

// watchedOf returns what the resolver, the checker and the prober have to know of the changed
// services, in their present state.
func (s *services) watchedOf(d *serviceDiff) *watched {
	w := &watched{paths: map[string]dataplane.Check{}, targets: map[netip.Addr]bool{}}
	names := slices.Concat(slices.Collect(maps.Keys(d.before)), slices.Collect(maps.Keys(d.after)))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		svc := s.byName[name]
		if svc == nil {
			continue
		}
		w.paths[name] = svc.checkOnPath()
		for _, m := range svc.members {
			w.targets[target(&m.Server)] = true
			if t, probed := svc.probeTarget(m); probed {
				t.Fault = probe.None // a fault is a finding, which does not count as a change
				w.probes = append(w.probes, t)
			}
		}
		checks := health.Targets([]desired.Service{*svc.Service})
		for i := range checks {
			if checks[i].OnPath { // the mark of its packets contains the slot
				checks[i].Mark = svc.member(checks[i].Server).slot
			}
		}
		w.checks = append(w.checks, checks...)
	}
	return w
}
