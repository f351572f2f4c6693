// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/lab"
)

// counts are what balancers and agents have counted so far.
type counts struct {
	reasons map[string]uint64             // of all balancers
	offers  map[string]*agent.AcceptState // of the case's service, by server
}

func (b *rig) count(p planned) (*counts, error) {
	c := &counts{reasons: map[string]uint64{}, offers: map[string]*agent.AcceptState{}}
	for _, n := range b.lab.Nodes {
		if n.Role != lab.RoleBalancer || b.lab.Topology.Bare {
			continue
		}
		if err := c.addBalancer(n.Instance()); err != nil {
			return nil, fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	offers, err := b.lab.Offers()
	if err != nil {
		return nil, err
	}
	for _, o := range offers {
		if o.Service == p.Case.Name {
			c.offers[o.Server] = o.AcceptState
		}
	}
	return c, nil
}

func (c *counts) addBalancer(instance string) error {
	view, err := inspect.OpenView(instance)
	if err != nil {
		return err
	}
	defer view.Close()
	snapshot, err := view.Snapshot()
	if err != nil {
		return err
	}
	for _, r := range snapshot.Reasons {
		c.reasons[r.Reason] += r.Packets
	}
	return nil
}

// addCounts adds to the run what was counted during it.
func (r *Run) addCounts(before, after *counts) {
	for reason, packets := range after.reasons {
		if n := packets - before.reasons[reason]; n > 0 {
			r.Counters[reason] = n
		}
	}
	for i := range r.Shares {
		s := &r.Shares[i]
		first, last := before.offers[s.Server], after.offers[s.Server]
		if first == nil || last == nil { // the case does not hunt
			continue
		}
		s.FirstThreshold, s.LastThreshold = first.Threshold, last.Threshold
		since := func(result string) uint64 { return last.Offers[result] - first.Offers[result] }
		s.Accepted = last.Accepted() - first.Accepted()
		s.Refused = since("refused") + since("refused_down")
		s.Returned, s.TakenBack = since("returned"), since("taken_back")
		s.Forced = since("forced")
	}
}
