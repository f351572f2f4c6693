// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/generation"
)

// Losses returns the servers whose flows a change to another desired state would affect. It returns
// an error if the context ends first.
func (b *Balancer) Losses(ctx context.Context, cfg *desired.Balancer) (losses []desired.Loss, err error) {
	err = b.call(ctx, func(context.Context) error {
		losses = b.losses(cfg.Services)
		return nil
	})
	return losses, err
}

// losses is Losses in the goroutine that owns the balancer.
func (b *Balancer) losses(services []desired.Service) []desired.Loss {
	losses := lossesOf(b.cfg.Services, services, b.generations)
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

// lossesOf compares the services before and after a change. A flow loses its server if packets no
// longer get from the VIP to that server: the server or the service is removed, or gets another
// address. It leaves the history if no set of the service's generations has its server any more: a
// balancer that does not know the flow then does not find it.
func lossesOf(before, after []desired.Service, g generation.Generations) (losses []desired.Loss) {
	next := g.Next(after)
	services := map[string]*desired.Service{}
	for i := range after {
		services[after[i].Name] = &after[i]
	}
	for i := range before {
		old := &before[i]
		now := services[old.Name]
		servers := serversByName(now)
		was, is := reachable(g[old.Name]), reachable(next[old.Name])
		for j := range old.Servers {
			server := &old.Servers[j]
			loss := desired.Loss{Service: old.Name, Server: server.Name}
			switch kept := servers[server.Name]; {
			case kept == nil:
				loss.Cause = desired.LossRemoved
			case !receives(now, old) || kept.Locator != server.Locator || kept.Address != server.Address:
				loss.Cause = desired.LossMoved
			case was[server.Name] && !is[server.Name]:
				loss.Cause = desired.LossForgotten
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

// receives tells whether a service gets all packets that it got before a change.
func receives(now, before *desired.Service) bool {
	return now.VIP == before.VIP && now.Protocol == before.Protocol &&
		(now.Port == before.Port || now.Port == desired.AllPorts)
}

// reachable returns the names of all servers in the sets of a generation.
func reachable(g generation.Generation) map[string]bool {
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
