// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// reloadsAtOnce is the number of agents that reload at the same time.
const reloadsAtOnce = 8

// resetThresholds sets the thresholds on all servers to their first value, if the case has the
// policy dynamic. Agents keep thresholds between runs, but each run of the simulator begins with
// the first value. A change of the policy resets a threshold: so each agent gets another policy,
// and then its own again.
func (b *rig) resetThresholds(ctx context.Context, p planned) error {
	if p.Case.Placement != desired.PlacementHunt || p.Case.policy() != desired.AcceptDynamic {
		return nil
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(reloadsAtOnce)
	for _, n := range b.lab.Nodes {
		if n.Role == lab.RoleServer {
			group.Go(func() error { return b.resetThreshold(ctx, n, p.Case.Name) })
		}
	}
	return group.Wait()
}

// resetThreshold gives one agent the policy never for the service, and then its own policy again.
func (b *rig) resetThreshold(ctx context.Context, n *lab.Node, service string) error {
	other := n.AgentConfig()
	for i := range other.Services {
		if s := &other.Services[i]; s.Name == service {
			s.Accept = desired.Accept{Policy: desired.AcceptNever}
		}
	}
	for _, c := range []desired.Agent{other, n.AgentConfig()} {
		if err := n.WriteAgentConfig(c); err != nil {
			return err
		}
		if err := b.lab.Process(n.Name, "agent").Reload(ctx); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	return nil
}
