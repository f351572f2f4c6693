// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/lab"
)

// feedback sets the weights of servers by their loads, at an interval: the centralised policy that
// 6LB compares itself with (section VI-B7). It writes overrides, and reloads the balancers.
type feedback struct {
	cancel context.CancelFunc
	done   chan error
}

// feedbackScale is the weight of an idle server, so that whole numbers tell weights from 0.1 to 1
// apart.
const feedbackScale = 20

// feedbackWeight is the weight of a server with b of n busy workers (6LB, footnote 7).
func feedbackWeight(busy uint32, workers int) uint32 {
	share := float64(busy) / float64(workers)
	return uint32(math.Round(feedbackScale * (0.1 + 0.9*math.Exp(-8*share*share))))
}

// startFeedback starts the feedback of a case. A case without feedback gets nil.
func (b *rig) startFeedback(ctx context.Context, p planned) *feedback {
	if p.Case.Feedback == 0 {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	f := &feedback{cancel, make(chan error, 1)}
	go func() { f.done <- b.adjustWeights(ctx, p) }()
	return f
}

// stop ends the feedback.
func (f *feedback) stop() error {
	if f == nil {
		return nil
	}
	f.cancel()
	return <-f.done
}

func (b *rig) adjustWeights(ctx context.Context, p planned) (err error) {
	defer func() { err = errors.Join(err, b.override(context.WithoutCancel(ctx), desired.Overrides{})) }()
	ticker := time.NewTicker(p.byTheClock(p.Case.Feedback))
	defer ticker.Stop()
	servers := p.serverNames()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		busy, err := b.busy()
		if err != nil {
			return err
		}
		var all desired.Overrides
		for i, name := range servers {
			weight := feedbackWeight(busy[i], p.Emulated.Of(name).Workers)
			all.Overrides = append(all.Overrides, desired.Override{Service: p.Case.Name, Server: name, Weight: &weight})
		}
		if err := b.override(ctx, all); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// override replaces the overrides of all balancers.
func (b *rig) override(ctx context.Context, all desired.Overrides) error {
	text, err := yaml.Dump(all)
	if err != nil {
		return err
	}
	for _, n := range b.lab.Nodes {
		if n.Role != lab.RoleBalancer {
			continue
		}
		c := n.BalancerConfig()
		path := config.OverridesFile(&c.Node)
		if len(all.Overrides) == 0 {
			if err = os.Remove(path); errors.Is(err, fs.ErrNotExist) {
				err = nil // the run ended before the first feedback
			}
		} else {
			err = replaceFile(path, text)
		}
		if err == nil {
			err = b.lab.Process(n.Name, "lb").Reload(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s: weights: %w", n.Name, err)
		}
	}
	return nil
}
