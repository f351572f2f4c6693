// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"context"
	"slices"

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
		if svc := b.services.byName[loss.Service]; svc != nil {
			if m := svc.member(loss.Server); m != nil {
				loss.Flows = b.liveFlows(svc, m)
			}
		}
	}
	return losses
}

// lossesOf compares the services before and after a change. A flow can lose its server because the
// server or the service is removed. It leaves the history if no set of the service's generations
// has its server any more: a balancer that does not know the flow then does not find it.
func lossesOf(before, after []desired.Service, g generation.Generations) (losses []desired.Loss) {
	next := g.Next(after)
	for i := range before {
		old := &before[i]
		now := slices.IndexFunc(after, func(s desired.Service) bool { return s.Name == old.Name })
		stays := map[string]bool{}
		if now >= 0 {
			for _, s := range after[now].Servers {
				stays[s.Name] = true
			}
		}
		was, is := reachable(g[old.Name]), reachable(next[old.Name])
		for _, s := range old.Servers {
			switch {
			case !stays[s.Name]:
				losses = append(losses, desired.Loss{Service: old.Name, Server: s.Name, Cause: desired.LossRemoved})
			case was[s.Name] && !is[s.Name]:
				losses = append(losses, desired.Loss{Service: old.Name, Server: s.Name, Cause: desired.LossForgotten})
			}
		}
	}
	return losses
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
