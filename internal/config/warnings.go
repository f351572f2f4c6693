// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
)

// warnOfBalancer adds the warnings about a balancer's file.
func (d *document) warnOfBalancer(b *desired.Balancer) {
	d.warnOfForgedSignals(b)
	d.warnOfUnknownClocks(b)
	d.warnOfNoTaker(b)
}

// warnOfAgent adds the warnings about an agent's file.
func (d *document) warnOfAgent(a *desired.Agent) {
	d.warnOfForgedQuestions(a)
	d.warnOfWorkersAsCapacity(a)
}

// warnOfForgedSignals warns if the balancer cannot tell a server's signal from a forged one.
func (d *document) warnOfForgedSignals(b *desired.Balancer) {
	hunts := func(s desired.Service) bool { return s.Placement == desired.PlacementHunt }
	hunting := slices.IndexFunc(b.Services, hunts)
	if hunting < 0 || !b.Node.IsInternal() || b.Node.SignalKey != "" {
		return
	}
	d.warnf(desired.SignalKeyField, "missing while node.internal is true: any host that can send packets "+
		"to %s through %s can pose as a server of %s and take over its connections",
		b.Node.Locator, b.Node.Interface, field.Item("services", hunting))
}

// warnOfUnknownClocks warns about load reports of servers whose clocks the balancer does not know.
// By the serials alone, a report of a server that has rebooted is older than those before, for up
// to half of the 6.5 days after which serials repeat.
func (d *document) warnOfUnknownClocks(b *desired.Balancer) {
	for i, s := range b.Services {
		if s.OrdersByReports() && !s.Probes() {
			d.warnf(field.Child(field.Item("services", i), "probe"), "with selection %s, the balancer ignores "+
				"load reports for up to 3.3 days after their server has rebooted", s.Selection)
		}
	}
}

// warnOfNoTaker warns about services without a server that gets new connections.
func (d *document) warnOfNoTaker(b *desired.Balancer) {
	for i, service := range b.Services {
		at := field.Child(field.Item("services", i), "servers")
		switch {
		case len(service.Servers) == 0:
			d.warnf(at, "none: packets to service %s are dropped", service.Name)
		case !service.Takes():
			d.warnf(at, "all are drained or have weight 0: service %s gets no new connections", service.Name)
		}
	}
}

// warnOfForgedQuestions warns if any host can pose as a balancer. It considers only services with
// fields for hunting: for other services, only the balancer's file tells whether they hunt.
func (d *document) warnOfForgedQuestions(a *desired.Agent) {
	if len(a.Node.Balancers) > 0 {
		return
	}
	for i := range a.Services {
		path := field.Item("services", i)
		if d.has(field.Child(path, "accept")) || d.has(field.Child(path, "load")) {
			d.warnf("node.balancers", "missing: any host that can send packets to %s through %s "+
				"can pose as a balancer and have replies of %s sent to itself",
				a.Node.Locator, a.Node.Interface, path)
			return
		}
	}
}

// warnOfWorkersAsCapacity warns if servers that compare their loads would compare them only when
// all workers of Apache are busy, because the source's own capacity is the number of workers.
func (d *document) warnOfWorkersAsCapacity(a *desired.Agent) {
	for i, s := range a.Services {
		if s.Accept.Policy != desired.AcceptLeast || s.Load.Kind != desired.LoadApache || s.Load.Capacity > 0 {
			continue
		}
		d.warnf(field.Child(field.Item("services", i), "load.capacity"),
			"missing: the server accepts every connection of %s while a worker is free; "+
				"set it to the number of processors if they bound the work", s.Name)
	}
}
