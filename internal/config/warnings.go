// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"
	"slices"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// warnOfBalancer adds the warnings about a balancer's file.
func (d *document) warnOfBalancer(b *desired.Balancer) {
	d.warnOfForgedSignals(b)
	d.warnOfUnknownClocks(b)
	d.warnOfSeveralBalancers(b)
	d.warnOfPeers(b)
	d.warnOfUnusedWeights(b)
	d.warnOfHLB(b)
	d.warnOfUnseenEnds(b)
	d.warnOfUnconfirmedEnds(b)
	d.warnOfNoTaker(b)
	d.warnOfVIPsWithoutPeer(b)
	d.warnOfEmptyAggregates(b)
	d.warnOfUnreachableVIPs(b)
}

// warnOfAgent adds the warnings about an agent's file.
func (d *document) warnOfAgent(a *desired.Agent) {
	d.warnOfForgedQuestions(a)
	d.warnOfWorkersAsCapacity(a)
}

// warnOfForgedSignals warns if the balancer cannot tell a server's signal from a forged one: it has
// no key for signals, and an interface that is inside the domain.
func (d *document) warnOfForgedSignals(b *desired.Balancer) {
	hunts := func(s desired.Service) bool { return s.IsAnswered() }
	hunting := slices.IndexFunc(b.Services, hunts)
	if hunting < 0 || !b.Node.IsInternal() || b.Node.SignalKey != "" {
		return
	}
	d.warnf(desired.SignalKeyField, "missing while node.internal is true: any host that can send packets "+
		"to %s through %s can pose as a server of %s and take over its connections",
		b.Node.Locator, b.Node.Interface, b.Services[hunting].Name)
}

// warnOfUnknownClocks warns about load reports of servers that the balancer does not probe. Probes
// tell the balancer the clocks of servers. Without them, it compares only the serials of reports.
// After a reboot of the server, its reports then seem older than those from before, for up to half
// of the 6.5 days after which serials repeat.
func (d *document) warnOfUnknownClocks(b *desired.Balancer) {
	for i, s := range b.Services {
		if s.OrdersByReports() && !s.Probes() {
			d.warnf(fieldpath.Child(fieldpath.Item("services", i), "probe"), "with selection %s, the balancer ignores "+
				"load reports for up to 3.3 days after their server has rebooted", s.Selection)
		}
	}
}

// warnOfSeveralBalancers warns about services that infer if there are several balancers: placement
// is then worse, or another balancer may not find the server of a flow. The numbers are from
// docs/research/placement.md.
func (d *document) warnOfSeveralBalancers(b *desired.Balancer) {
	several := len(b.Node.Balancers()) > 1
	for i, s := range b.Services {
		if !several || !s.Placement.Infers() {
			continue
		}
		at := fieldpath.Item("services", i)
		switch {
		case s.Infer.Among == desired.AmongCandidates && len(s.Servers) <= s.Candidates:
			// All servers are candidates.
		case s.Infer.Among == desired.AmongCandidates:
			cause := "infer.among"
			if s.FindsByColumn() { // the persistence permits no other value of infer.among
				cause = "persistence"
			}
			d.warnf(fieldpath.Child(at, cause), "the favourites of several balancers are the same "+
				"candidates: in simulations with 4 and 16 balancers, flows took 891 and 2741 ms instead of "+
				"544 and 692 (territory), and 827 and 1260 ms instead of 699 and 743 (durations)")
		case !s.Probes():
			d.warnf(fieldpath.Child(at, "infer.among"), "%s, and servers without agents: packets of a "+
				"connection that come to another balancer do not find their server", s.Infer.Among)
		case len(s.Servers) > s.Candidates:
			d.warnf(fieldpath.Child(at, "infer.among"), "%s: packets of a connection that come to another "+
				"balancer visit %d of %d servers, and may not find theirs", s.Infer.Among, s.Candidates,
				len(s.Servers))
		}
	}
}

// warnOfPeers warns if node.peers does not fit services whose servers have home balancers: the
// names of the balancers decide which of them is the home of a server. A service with infer.among:
// candidates probably has several balancers, so node.peers must not be empty.
func (d *document) warnOfPeers(b *desired.Balancer) {
	if !slices.ContainsFunc(b.Services, func(s desired.Service) bool { return s.HasTerritories() }) {
		return
	}
	peers := b.Node.Peers
	if len(peers) > 0 && !slices.Contains(peers, b.Node.Name) {
		d.warnf("node.peers", "does not include node.name, %q: unless the other balancers have it in their "+
			"lists, they have other ideas of whose server is whose", b.Node.Name)
	}
	i := slices.IndexFunc(b.Services, func(s desired.Service) bool {
		return s.HasTerritories() && s.Infer.Among == desired.AmongCandidates
	})
	if len(peers) == 0 && i >= 0 {
		d.warnf("node.peers", "missing: if several balancers have %s, as its infer.among suggests, they "+
			"prefer the same servers", fieldpath.Item("services", i))
	}
}

// warnOfUnusedWeights warns about different weights that a placement ignores. The estimator
// territory-learned does not ignore weights: they widen the bounds of the capacities that it
// learns.
func (d *document) warnOfUnusedWeights(b *desired.Balancer) {
	for i, s := range b.Services {
		if !s.IgnoresWeights() || s.EstimatorName() == string(desired.EstimateTerritoryLearned) {
			continue
		}
		at := fieldpath.Item("services", i)
		differs := slices.IndexFunc(s.Servers, func(server desired.Server) bool {
			return *server.Weight > 0 && *server.Weight != s.HeaviestWeight()
		})
		if differs >= 0 {
			d.warnf(fieldpath.Child(fieldpath.Item(fieldpath.Child(at, "servers"), differs), "weight"),
				"not used by %s, other than 0: placement sed uses weights, and placement infer with "+
					"estimator territory", s.EstimatorName())
		}
	}
}

// warnOfHLB warns about estimators of HLB: hlb and hlb-fixed once were what durations and
// durations-fixed are now, and what the paper prints has no defence against clients and faulty
// servers. It also warns about what such an estimator ignores, and about the former name of an
// estimator.
func (d *document) warnOfHLB(b *desired.Balancer) {
	for i, s := range b.Services {
		if s.Infer == nil || len(s.Placement.Method().Estimators) == 0 {
			continue
		}
		at := fieldpath.Child(fieldpath.Item("services", i), "infer")
		estimator := fieldpath.Child(at, "estimator")
		if present := s.Infer.Estimator.Method().StandsFor; present != "" {
			d.warnf(estimator, "%s is the former name of %s", s.Infer.Estimator, present)
		}
		if !s.IsPrintedHLB() {
			continue
		}
		former := desired.EstimateDurations
		if s.Infer.Estimator == desired.EstimateHLBFixed {
			former = desired.EstimateDurationsFixed
		}
		d.warnf(estimator, "%s is HLB as the paper prints it, for comparisons: a server that refuses "+
			"connections attracts all new flows, and clients can make a server seem slow; in earlier "+
			"builds %s had the method of %s", s.Infer.Estimator, s.Infer.Estimator, former)
		if slowStart := fieldpath.Child(at, "slow-start"); d.has(slowStart) && *s.Infer.SlowStart > 0 {
			d.warnf(slowStart, "not used by estimator %s", s.Infer.Estimator)
		}
		if s.FindsByColumn() {
			d.warnf(estimator, "with persistence %s, %s sees only a part of the packets", s.Persistence,
				s.Infer.Estimator)
		}
	}
}

// warnOfUnseenEnds warns about services of UDP with an estimator that learns from the ends of
// flows: no packet of UDP ends a flow.
func (d *document) warnOfUnseenEnds(b *desired.Balancer) {
	for i, s := range b.Services {
		// Each estimator that ignores weights learns how fast servers are, from the ends of flows.
		// HLB as printed learns from packets.
		learns := len(s.Placement.Method().Estimators) > 0 && s.IgnoresWeights() && !s.IsPrintedHLB()
		if learns && s.Protocol == desired.UDP {
			d.warnf(fieldpath.Child(fieldpath.Item("services", i), "infer.estimator"), "%s learns nothing from udp, "+
				"because no packet ends a flow: it takes all servers for equal", s.EstimatorName())
		}
	}
}

// warnOfUnconfirmedEnds warns about a value of timeouts.closing that has no effect. This timeout is
// for flows whose server has signalled their end, and only servers of services that hunt signal it.
func (d *document) warnOfUnconfirmedEnds(b *desired.Balancer) {
	for i, s := range b.Services {
		path := fieldpath.Child(fieldpath.Item("services", i), "timeouts.closing")
		if !s.ServersDecide() && d.has(path) {
			d.warnf(path, "not used by placement %s: only servers that hunt confirm the end of a flow, and a "+
				"client's FIN or RST may be forged, so the flow's entry stays for timeouts.established", s.Placement)
		}
	}
}

// warnOfNoTaker warns about services without a server that gets new connections.
func (d *document) warnOfNoTaker(b *desired.Balancer) {
	for i, service := range b.Services {
		at := fieldpath.Child(fieldpath.Item("services", i), "servers")
		switch {
		case len(service.Servers) == 0:
			d.warnf(at, "none: service %s refuses all clients", service.Name)
		case !service.Takes():
			d.warnf(at, "all are drained or have weight 0: service %s gets no new connections", service.Name)
		}
	}
}

// warnOfVIPsWithoutPeer warns about VIPs that should be announced, but that no peer takes.
func (d *document) warnOfVIPsWithoutPeer(b *desired.Balancer) {
	if b.BGP == nil {
		return
	}
	for i, s := range b.Services {
		if s.Announcement() == desired.AnnounceNever {
			continue
		}
		for j, vip := range s.AllVIPs() {
			if family := desired.FamilyOf(vip); !b.BGP.Announces(family) {
				d.warnf(s.VIPPath(i, j), "is not announced: no peer in bgp.peers has the "+
					"family %s; for a service that is not to be announced, write bgp: {announce: never}", family)
			}
		}
	}
}

// warnOfUnreachableVIPs warns about VIPs that no client may reach, because no source prefix is of
// their family.
func (d *document) warnOfUnreachableVIPs(b *desired.Balancer) {
	for i := range b.Services {
		s := &b.Services[i]
		for j, vip := range s.AllVIPs() {
			isSame := func(p netip.Prefix) bool { return p.Addr().Is4() == vip.Is4() }
			if len(s.Sources) > 0 && !slices.ContainsFunc(s.Sources, isSame) {
				d.warnf(s.VIPPath(i, j), "no client may reach it: no prefix in sources is %s", desired.FamilyOf(vip))
			}
		}
	}
}

// warnOfEmptyAggregates warns about aggregates that no service makes the balancer announce.
func (d *document) warnOfEmptyAggregates(b *desired.Balancer) {
	if b.BGP == nil || b.Store != nil { // the store has the services
		return
	}
	for i, a := range b.BGP.Aggregates {
		isUsed := slices.ContainsFunc(b.Services, func(s desired.Service) bool {
			return s.Announcement() != desired.AnnounceNever && slices.ContainsFunc(s.AllVIPs(), a.Prefix.Contains)
		})
		if !isUsed {
			d.warnf(fieldpath.Child(fieldpath.Item("bgp.aggregates", i), "prefix"), "is not announced: no service that is "+
				"announced has a VIP inside")
		}
	}
}

// warnOfForgedQuestions warns if any host can pose as a balancer of a service that hunts. Only the
// balancers' files tell which services hunt. So the warning is for services with the field accept
// or load, which probably do. Servers of UDP answer no balancer.
func (d *document) warnOfForgedQuestions(a *desired.Agent) {
	if len(a.Node.Balancers) > 0 {
		return
	}
	for i := range a.Services {
		path := fieldpath.Item("services", i)
		isSet := d.has(fieldpath.Child(path, "accept")) || d.has(fieldpath.Child(path, "load"))
		if isSet && a.Services[i].Protocol == desired.TCP {
			d.warnf("node.balancers", "missing: any host that can send packets to %s through %s "+
				"can pose as a balancer and have replies of %s sent to itself",
				a.Node.Locator, a.Node.Interface, a.Services[i].Name)
			return
		}
	}
}

// warnOfWorkersAsCapacity warns about the load source Apache without a capacity. The capacity is
// then the number of workers. So a server with policy least compares its load with others only when
// all workers are busy.
func (d *document) warnOfWorkersAsCapacity(a *desired.Agent) {
	for i, s := range a.Services {
		if s.Accept.Policy != desired.AcceptLeast || s.Load.Kind != desired.LoadApache || s.Load.Capacity > 0 {
			continue
		}
		d.warnf(fieldpath.Child(fieldpath.Item("services", i), "load.capacity"),
			"missing: the server accepts every connection of %s while a worker is free; "+
				"set it to the number of processors if they bound the work", s.Name)
	}
}
