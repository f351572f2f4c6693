// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"net/netip"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
)

// Losses returns the servers whose flows a change to another desired state would affect. It returns
// an error if the context ends first.
func (b *Balancer) Losses(ctx context.Context, cfg *desired.Balancer) (losses []desired.Loss, err error) {
	err = b.call(ctx, func(context.Context) error {
		losses = b.losses(diffOf(b.cfg.Services, cfg.Services))
		return nil
	})
	return losses, err
}

// losses does the work of Losses. Only the goroutine that owns the balancer calls it.
func (b *Balancer) losses(diff *serviceDiff) []desired.Loss {
	losses := lossesOf(b.cfg.Services, diff, b.generations)
	for i := range losses {
		loss := &losses[i]
		svc := b.services.byName[loss.Service]
		if svc == nil {
			continue
		}
		if m := svc.member(loss.Server); m != nil {
			loss.Flows = b.liveFlows(svc, m)
		}
	}
	return losses
}

// lossesOf returns what services lose by a change. A flow loses its server if packets no longer get
// from the VIP to that server: the server or the service is removed, or gets another address. If no
// set of the service's generations has the server any more, a balancer that does not know the flow
// does not find it (LossForgotten). If the service gets fewer VIPs or ports, only the flows of the
// others lose their server (LossNarrowed).
func lossesOf(
	before []desired.Service, diff *serviceDiff, g serversets.Generations,
) (losses []desired.Loss) {
	hadPort, hasPort := takenPorts(diff.before), takenPorts(diff.after)
	for i := range before {
		old := &before[i]
		now, changes := old, diff.has(old.Name)
		if changes {
			now = diff.after[old.Name] // nil if the service is removed
		}
		keepsSome, keepsAll := keptPorts(old, now, hadPort, hasPort)
		if keepsAll && !changes { // a service that does not change can lose a port to another one
			continue
		}
		next := g[old.Name] // the generation after the change
		if now != nil {
			next = next.Next(now)
		}
		servers := serversByName(now)
		was, is := reachable(g[old.Name]), reachable(next)
		for j := range old.Servers {
			server := &old.Servers[j]
			loss := desired.Loss{Service: old.Name, Server: server.Name}
			switch kept := servers[server.Name]; {
			case kept == nil:
				loss.Cause = desired.LossRemoved
			case !keepsSome || kept.Locator != server.Locator || kept.Address != server.Address:
				loss.Cause = desired.LossMoved
			case was[server.Name] && !is[server.Name]:
				loss.Cause = desired.LossForgotten // flows of all ports
			case !keepsAll:
				loss.Cause = desired.LossNarrowed
			default:
				continue
			}
			losses = append(losses, loss)
		}
	}
	return losses
}

// serversByName returns the servers of a service by their names. The service may be nil.
func serversByName(s *desired.Service) map[string]*desired.Server {
	servers := map[string]*desired.Server{}
	if s == nil {
		return servers
	}
	for i := range s.Servers {
		servers[s.Servers[i].Name] = &s.Servers[i]
	}
	return servers
}

// portKey is a port of a VIP.
type portKey struct {
	vip      netip.Addr
	protocol desired.Protocol
	port     desired.Port
}

// entriesOf returns the ports of a service at all of its VIPs.
func entriesOf(s *desired.Service) (ports []portKey) {
	for _, vip := range s.AllVIPs() {
		for _, port := range s.AllPorts() {
			ports = append(ports, portKey{vip, s.Protocol, port})
		}
	}
	return ports
}

// takenPorts returns the single ports of services. Packets to such a port do not go to the service of
// all ports of the same VIP.
func takenPorts(services map[string]*desired.Service) map[portKey]bool {
	ports := map[portKey]bool{}
	for _, s := range services {
		for _, key := range entriesOf(s) {
			if key.port != desired.AllPorts {
				ports[key] = true
			}
		}
	}
	return ports
}

// keptPorts compares the ports of a service before and after a change. It tells whether the service
// keeps some of them, and whether it keeps all. A removed service has now == nil. takenBefore
// and takenNow are the single ports that changed services have before the change and after it.
func keptPorts(old, now *desired.Service, takenBefore, takenNow map[portKey]bool) (some, all bool) {
	if now == nil {
		return false, false
	}
	has := map[portKey]bool{}
	for _, key := range entriesOf(now) {
		has[key] = true
	}
	all = true
	for _, had := range entriesOf(old) {
		keepsSome, keepsAll := keptPort(had, has, takenBefore, takenNow)
		some, all = some || keepsSome, all && keepsAll
	}
	return some, all
}

// keptPort tells whether a service keeps some of the ports of an entry that it had, and whether it
// keeps all of them. has are the entries that the service has now.
func keptPort(had portKey, has, takenBefore, takenNow map[portKey]bool) (some, all bool) {
	ofVIP := func(key portKey) bool { return key.vip == had.vip && key.protocol == had.protocol }
	allPorts := portKey{had.vip, had.protocol, desired.AllPorts}
	if had.port != desired.AllPorts { // a single port before
		keeps := has[had] || has[allPorts] && !takenNow[had]
		return keeps, keeps
	}
	if !has[allPorts] { // all ports before, single ones now
		for key := range has {
			some = some || ofVIP(key) && !takenBefore[key]
		}
		return some, false
	}
	// The service has all ports before and now. A new service of one port takes this port away.
	for key := range takenNow {
		if ofVIP(key) && !takenBefore[key] {
			return true, false
		}
	}
	return true, true
}

// reachable returns the names of the servers in a generation's sets. It leaves out former sets that
// the present candidate table cannot hold.
func reachable(g serversets.Generation) map[string]bool {
	names := map[string]bool{}
	for i, set := range g.Sets {
		if i > 0 && !g.Sets[0].CanHold(set) {
			continue
		}
		for _, s := range set.Servers {
			names[s.Name] = true
		}
	}
	return names
}
