// SPDX-License-Identifier: Apache-2.0

package config

import "slices"

// Warnings returns errors about valid settings that are rarely intended, in the order of the file's
// lines. A balancer that was not read from a file has none.
func (b *Balancer) Warnings() Errors { return b.warnings }

// Warnings is as that of Balancer.
func (a *Agent) Warnings() Errors { return a.warnings }

// warnOfBalancer adds the warnings about a balancer's file.
func (d *document) warnOfBalancer(b *Balancer) {
	d.warnOfForgedSignals(b)
	d.warnOfNoTaker(b)
}

// warnOfAgent adds the warnings about an agent's file.
func (d *document) warnOfAgent(a *Agent) {
	d.warnOfForgedQuestions(a)
}

// warnOfForgedSignals warns if the balancer cannot tell a server's signal from a forged one.
func (d *document) warnOfForgedSignals(b *Balancer) {
	hunts := func(s Service) bool { return s.Placement == PlacementHunt }
	hunting := slices.IndexFunc(b.Services, hunts)
	if hunting < 0 || !b.Node.IsInternal() || b.Node.SignalKey != "" {
		return
	}
	d.warnf(signalKeyPath, "missing while node.internal is true: any host that can send packets "+
		"to %s through %s can pose as a server of %s and take over its connections",
		b.Node.Locator, b.Node.Interface, item("services", hunting))
}

// warnOfNoTaker warns about services without a server that gets new connections.
func (d *document) warnOfNoTaker(b *Balancer) {
	for i, service := range b.Services {
		at := child(item("services", i), "servers")
		switch {
		case len(service.Servers) == 0:
			d.warnf(at, "none: packets to service %s are dropped", service.Name)
		case !slices.ContainsFunc(service.Servers, func(s Server) bool { return s.Takes() }):
			d.warnf(at, "all are drained or have weight 0: service %s gets no new connections", service.Name)
		}
	}
}

// warnOfForgedQuestions warns if any host can pose as a balancer. It considers only services with
// fields for hunting: for other services, only the balancer's file tells whether they hunt.
func (d *document) warnOfForgedQuestions(a *Agent) {
	if len(a.Node.Balancers) > 0 {
		return
	}
	for i := range a.Services {
		path := item("services", i)
		if d.has(child(path, "accept")) || d.has(child(path, "load")) {
			d.warnf("node.balancers", "missing: any host that can send packets to %s through %s "+
				"can pose as a balancer and have replies of %s sent to itself",
				a.Node.Locator, a.Node.Interface, path)
			return
		}
	}
}
