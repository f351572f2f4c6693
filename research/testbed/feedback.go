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

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// feedback sets the weights of servers by their loads, at an interval: the centralised policy that
// 6LB compares itself with (section VI-B7). It writes overrides, and reloads the balancers. A case
// without feedback has a nil feedback.
type feedback struct {
	cancel   context.CancelFunc
	done     chan error
	interval time.Duration // by the clock
	updates  int           // how often all weights were set
	lasted   time.Duration // from the start of the feedback to its end
}

// feedbackScale is the weight of an idle server, which is 1 in 6LB. With this scale, whole numbers
// can stand for 6LB's weights from 0.1 to 1.
const feedbackScale = 20

// feedbackWeight returns the weight of a server by the share of its workers that are busy (6LB,
// footnote 7).
func feedbackWeight(busy uint32, workers int) uint32 {
	share := float64(busy) / float64(workers)
	return uint32(math.Round(feedbackScale * (0.1 + 0.9*math.Exp(-8*share*share))))
}

// startFeedback starts the feedback of a case. If the feedback fails, it calls end, which ends the
// run. For a case without feedback, the result is nil.
func (b *rig) startFeedback(ctx context.Context, end context.CancelCauseFunc, p planned) *feedback {
	if p.Case.Feedback == 0 {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	f := &feedback{
		cancel: cancel, done: make(chan error, 1), interval: p.byTheClock(p.Case.Feedback),
	}
	go func() {
		err := b.adjustWeights(ctx, p, f)
		if err != nil {
			end(err)
		}
		f.done <- err
	}()
	return f
}

func (f *feedback) stop() error {
	if f == nil {
		return nil
	}
	f.cancel()
	return <-f.done
}

// mostMissedShare is the share of the intervals in which weights may stay as they are, because a
// reload of the balancers took longer.
const mostMissedShare = 0.1

// warnings returns a warning if the weights followed the loads less often than they should have.
// The feedback must have stopped.
func (f *feedback) warnings() []string {
	if f == nil {
		return nil
	}
	wanted := int(f.lasted / f.interval)
	if float64(f.updates) >= (1-mostMissedShare)*float64(wanted) {
		return nil
	}
	return []string{fmt.Sprintf("weights followed the loads %d times instead of %d: reloads took "+
		"too long; a lower --speed leaves more time", f.updates, wanted)}
}

// adjustWeights sets the weights of a case's servers by their busy workers, at each interval, until
// the context ends. Then it gives all servers the same weight again.
func (b *rig) adjustWeights(ctx context.Context, p planned, f *feedback) (err error) {
	began := time.Now()
	defer func() {
		f.lasted = time.Since(began)
		err = errors.Join(err, b.override(context.WithoutCancel(ctx), desired.Overrides{}))
	}()
	ticker := time.NewTicker(f.interval)
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
			all.Overrides = append(all.Overrides,
				desired.Override{Service: p.Case.Name, Server: name, Set: desired.Fields{"weight": weight}})
		}
		// The end of the run may interrupt a reload, which is no error.
		if err := b.override(ctx, all); err != nil && ctx.Err() == nil {
			return err
		}
		f.updates++
	}
}

// setWeights gives the servers of a case with weights their weights. The returned function gives all
// servers the same weight again.
func (b *rig) setWeights(ctx context.Context, p planned) (reset func() error, err error) {
	if !p.Case.Weighted && p.Case.Weights == nil {
		return func() error { return nil }, nil
	}
	var all desired.Overrides
	for i, weight := range p.weights() {
		all.Overrides = append(all.Overrides,
			desired.Override{Service: p.Case.Name, Server: serverName(i + 1), Set: desired.Fields{"weight": weight}})
	}
	reset = func() error {
		return b.override(context.WithoutCancel(ctx), desired.Overrides{})
	}
	return reset, b.override(ctx, all)
}

// weights returns the case's own weights, or those in proportion to the servers' capacities.
// For the estimator TerritoryConfigured, a weight must be the number of requests that a server
// serves at once.
func (p planned) weights() (weights []uint32) {
	if p.Case.Weights != nil {
		return p.Case.Weights
	}
	if p.Case.estimator() == infer.TerritoryConfigured {
		for _, name := range p.serverNames() {
			weights = append(weights, uint32(p.Emulated.Of(name).Cores))
		}
		return weights
	}
	var servers []sim.Server
	for _, name := range p.serverNames() {
		servers = append(servers, sim.Server{CPUs: 1, Speed: p.capacityOf(name)})
	}
	return placement.TableWeights(servers)
}

// override replaces the overrides of all balancers, and reloads the balancers. If there are no
// overrides, it removes the files of the overrides.
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
		path := c.OverridesFile()
		if len(all.Overrides) == 0 {
			if err = os.Remove(path); errors.Is(err, fs.ErrNotExist) {
				err = nil // the run ended before the first feedback
			}
		} else {
			err = atomicfile.Write(path, text, 0o644)
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
