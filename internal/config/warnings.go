// SPDX-License-Identifier: Apache-2.0

package config

import "slices"

// Warnings are what is valid in the file that b was read from, but rarely meant, in the order of its
// lines. A balancer that was not read from a file has none.
func (b *Balancer) Warnings() Errors { return b.warnings }

// Warnings are the agent's, as those of Balancer.
func (a *Agent) Warnings() Errors { return a.warnings }

// warnOfBalancer reports what is valid in a balancer's file, but rarely meant.
func (d *document) warnOfBalancer(b *Balancer) {
	d.warnOfForgedSignals(b)
	d.warnOfNoWeight(b)
}

// warnOfAgent reports what is valid in an agent's file, but rarely meant.
func (d *document) warnOfAgent(a *Agent) {
	d.warnOfForgedQuestions(a)
}

// warnOfForgedSignals warns where nothing tells a server's signal from that of another host.
func (d *document) warnOfForgedSignals(b *Balancer) {
	hunts := func(s Service) bool { return s.Placement == PlacementHunt }
	hunting := slices.IndexFunc(b.Services, hunts)
	if hunting < 0 || !b.Node.IsInternal() || b.Node.SignalKey != "" {
		return
	}
	d.warnf(signalKeyPath, "missing, though node.internal is true: any host that can send packets "+
		"to %s through %s can pose as a server of %s and take over its connections",
		b.Node.Locator, b.Node.Interface, item("services", hunting))
}

// warnOfNoWeight warns of services that take no new connection, though they are kept.
func (d *document) warnOfNoWeight(b *Balancer) {
	for i, service := range b.Services {
		if !slices.ContainsFunc(service.Servers, func(s Server) bool { return *s.Weight > 0 }) {
			d.warnf(child(item("services", i), "servers"),
				"all have weight 0: %s takes no new connections", service.Name)
		}
	}
}

// warnOfForgedQuestions warns where any host passes for a balancer. Only a service with fields for hunting
// counts: a balancer may as well hash it, and only the balancer's file says so.
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
