// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"math"
)

// hold opens connections that stay open, as those of clients that seldom send a request, and counts
// how many each server has. At the end of the run, a request on each connection shows whether it is
// still open.
func (b *rig) hold(ctx context.Context, p planned) (*Run, error) {
	if err := b.awaitIdle(ctx); err != nil {
		return nil, err
	}
	if err := b.resetThresholds(ctx, p); err != nil {
		return nil, err
	}
	before, err := b.count(p)
	if err != nil {
		return nil, err
	}
	connections, err := b.open(ctx, p.client(), p.service().Address(), p.Connections)
	defer closeAll(connections)
	if err != nil {
		return nil, err
	}
	after, err := b.count(p)
	if err != nil {
		return nil, err
	}
	run := p.newHeldRun(connections)
	run.addCounts(before, after)
	run.addConnections(connections, nil)
	return run, nil
}

// newHeldRun returns a run with the number of connections of each server. Run.Requests and
// Share.Responses then count connections.
func (p planned) newHeldRun(connections []*longLived) *Run {
	run := &Run{
		Case: p.Case.Name, Point: p.point, Seed: p.seed, Servers: p.present, Balancers: p.Balancers,
		Requests: uint64(len(connections)), Failures: map[string]uint64{Broken: 0},
		Counters: map[string]uint64{},
	}
	open := map[string]uint64{}
	for _, c := range connections {
		open[c.server]++
	}
	var loads []float64
	for _, name := range p.serverNames() {
		run.Shares = append(run.Shares, Share{Server: name, Responses: open[name]})
		loads = append(loads, float64(open[name]))
	}
	run.Fairness = Fairness(loads)
	return run
}

// FromEven returns the largest distance of a server's responses from an even share of them. For
// KindHold, responses are open connections. It is NaN if no shares are known.
func (r *Run) FromEven() float64 {
	if len(r.Shares) == 0 {
		return math.NaN()
	}
	sum := uint64(0)
	for _, s := range r.Shares {
		sum += s.Responses
	}
	even, largest := float64(sum)/float64(len(r.Shares)), 0.0
	for _, s := range r.Shares {
		largest = max(largest, math.Abs(float64(s.Responses)-even))
	}
	return largest
}
