// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"iter"
	"net/netip"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/nexthop"
	"github.com/segue-lb/segue/internal/srv6"
)

// target returns the address whose route the packets to a server take.
func target(server *desired.Server) netip.Addr {
	if server.Locator.IsValid() {
		return srv6.SID{Locator: server.Locator, Function: srv6.Deliver}.Addr()
	}
	return server.Address
}

// wayTo returns the address whose route the packets to a target take. On an underlay, that is the
// IPv4 address of the host.
func (b *Balancer) wayTo(target netip.Addr) netip.Addr {
	if b.cfg.Node.Underlay != nil && target.Is6() {
		return desired.UnderlayAddress(target)
	}
	return target
}

// waysTo returns the addresses whose routes packets to targets take, each of them once.
func (b *Balancer) waysTo(targets []netip.Addr) []netip.Addr {
	all := make([]netip.Addr, len(targets))
	for i, t := range targets {
		all[i] = b.wayTo(t)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// serversOf iterates over the servers of a configuration, each with its service.
func serversOf(cfg *desired.Balancer) iter.Seq2[*desired.Service, *desired.Server] {
	return func(yield func(*desired.Service, *desired.Server) bool) {
		for i := range cfg.Services {
			svc := &cfg.Services[i]
			for j := range svc.Servers {
				if !yield(svc, &svc.Servers[j]) {
					return
				}
			}
		}
	}
}

// targetsOf lists the targets of a configuration's servers, each of them once.
func targetsOf(cfg *desired.Balancer) []netip.Addr {
	seen := map[netip.Addr]bool{}
	var targets []netip.Addr
	for _, server := range serversOf(cfg) {
		if t := target(server); !seen[t] {
			seen[t] = true
			targets = append(targets, t)
		}
	}
	return targets
}

// awaitHops waits for the next hops of the servers that a configuration adds. Otherwise packets
// could be sent to a server that has no next hop yet, and would be dropped. It returns when all of
// these next hops are known, but at the latest b.patience after the resolver's first update, or
// when the context ends. Meanwhile the balancer acts on checks and probes of the present servers,
// as control does. The caller must call setTargets afterwards: the update that follows then also
// tells what has happened to the node's interfaces meanwhile.
func (b *Balancer) awaitHops(ctx context.Context, cfg *desired.Balancer) {
	present := targetsOf(b.cfg)
	added := addedTo(present, targetsOf(cfg))
	if len(added) == 0 {
		return
	}
	b.resolver.SetTargets(ctx, b.waysTo(slices.Concat(present, added)))
	var patience <-chan time.Time
	for !b.resolved(added) {
		b.arm()
		select {
		case <-ctx.Done():
			return
		case update := <-b.resolver.Updates():
			b.takeHops(update)
			if patience == nil {
				patience = time.After(b.patience)
			}
		case result := <-b.checker.Updates():
			b.takeHealth(result)
		case results := <-b.prober.Updates():
			b.takeFaults(results)
		case <-b.choice.C:
			b.choose()
		case now := <-b.slow.C:
			b.tick(now)
		case <-patience:
			return
		}
	}
}

// addedTo returns the targets that are not among the present ones.
func addedTo(present, targets []netip.Addr) []netip.Addr {
	known := map[netip.Addr]bool{}
	for _, t := range present {
		known[t] = true
	}
	return slices.DeleteFunc(targets, func(t netip.Addr) bool { return known[t] })
}

// takeHops applies the next hops of an update.
func (b *Balancer) takeHops(update nexthop.Update) {
	b.hops, b.problems = update.Hops, update.Problems
	b.applyHops()
}

// applyHops writes the next hops into the server table. A server without a next hop gets no new
// flows, and its packets are dropped and counted. A server whose next hop does not answer keeps its
// flows and gets no new ones. Until this process has attached the data path, a server for which the
// resolver has no next hop keeps the next hop that the earlier process has written.
func (b *Balancer) applyHops() {
	for name := range b.services.byName {
		b.applyHopsOf(name)
	}
	b.admit()
}

// applyHopsOf writes the next hops of a service's members. If that changes the causes of a member,
// or whether it has had a route of its own, the service becomes stale: admit must look at it again.
func (b *Balancer) applyHopsOf(name string) {
	for _, m := range b.services.byName[name].members {
		causes, routed := b.services.causes(m), m.routed
		b.applyHop(m)
		if b.services.causes(m) != causes || m.routed != routed {
			b.stale[name] = true
		}
	}
}

// applyHop writes the next hop of a member, and sets the causes that follow from it. If the
// resolver has no next hop for the member, applyHop clears the one in the table, but not before
// this process has attached the data path. If the interface cannot get a port number, applyHop logs
// that, and the next hop stays.
func (b *Balancer) applyHop(m *member) {
	to := b.wayTo(target(&m.Server))
	hop, ok := b.hops[to]
	m.setReason(dataplane.Unresolved, true, b.problems[to]) // empty if the member has a next hop
	if !ok {
		if b.attached {
			b.plane.Servers.ClearNextHop(m.slot)
			m.set(dataplane.Unreachable, false) // the server is unresolved instead
		}
		return
	}
	b.checkEgress(hop.Link)
	port, err := b.plane.Ports.Number(hop.Link)
	if err != nil {
		b.log.Error("next hop", "server", m.Name, "error", err)
		return
	}
	m.set(dataplane.Unreachable, hop.Silent)
	m.routed = m.routed || !hop.Default
	b.plane.Servers.SetNextHop(m.slot, hop.MAC, port)
}

// checkEgress warns once of each interface that drops all packets that XDP redirects to it. In
// generic mode the kernel can send through any interface.
func (b *Balancer) checkEgress(link nexthop.Link) {
	if b.mode != datapath.Native || dataplane.CanTransmit(link) || b.warned[link.Name] {
		return
	}
	b.warned[link.Name] = true
	b.log.Warn("servers are reached by an interface that cannot send what XDP forwards: their packets "+
		"are lost, and counted as forwarded; route to them by a physical interface",
		"interface", link.Name, "type", link.Type)
}

// nextHops returns the next hops in the server table, by target, as an earlier process has noted
// them. A server that once had a route of its own, and has no next hop now, has a Hop without MAC
// address and interface: it must not fall back to the default route.
func (b *Balancer) nextHops() map[netip.Addr]nexthop.Hop {
	hops := map[netip.Addr]nexthop.Hop{}
	for svc, server := range serversOf(b.cfg) {
		key := keyOfServer(svc, server, b.cfg.Node.Locator, b.cfg.Node.Addresses)
		slot, ok := b.slots.Of(key)
		if !ok {
			continue
		}
		noted := b.slots.Noted(key)
		mac, port, known := b.plane.Servers.NextHop(slot)
		if !known && !noted.Routed { // nothing is known of the target's route
			continue
		}
		to := b.wayTo(target(server))
		hop, isShared := hops[to] // with a server of another service
		// The route of a target is the default route if none of its servers had its own.
		hop.Default = !noted.Routed && (!isShared || hop.Default)
		if known {
			hop.MAC, hop.Silent = mac, noted.Causes.Has(dataplane.Unreachable)
			hop.Link.Index = b.plane.Ports.Ifindex(port)
		}
		hops[to] = hop
	}
	return hops
}

// resolved tells whether all targets have a next hop.
func (b *Balancer) resolved(targets []netip.Addr) bool {
	for _, t := range targets {
		if _, ok := b.hops[b.wayTo(t)]; !ok {
			return false
		}
	}
	return true
}
