// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/segue-lb/segue/internal/agent"
	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/lab"
)

// counts are the numbers that balancers and agents have counted so far.
type counts struct {
	reasons map[string]uint64             // packets of all balancers, by reason
	offers  map[string]*agent.AcceptState // of the case's service, by server
	// estimates are what the balancers infer about the servers of the case's service: by server,
	// the mean over the balancers of its capacity or weight.
	estimates map[string]float64
	lost      int64 // frames that switches have lost
}

// count reads what balancers and agents of Segue have counted until now. A bare lab has none, and
// neither has one with proxies.
func (b *rig) count(p planned) (*counts, error) {
	c := &counts{
		reasons: map[string]uint64{}, offers: map[string]*agent.AcceptState{},
		estimates: map[string]float64{},
	}
	for _, n := range b.lab.Nodes {
		if n.Role != lab.RoleBalancer || !b.lab.Topology.RunsSegue() {
			continue
		}
		if err := c.addBalancer(n.Instance(), p); err != nil {
			return nil, fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	var err error
	if c.lost, err = b.lostFrames(); err != nil {
		return nil, err
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

// addBalancer adds the counts of one balancer: packets by reason, and what it infers about the
// servers of the run's service.
func (c *counts) addBalancer(instance string, p planned) error {
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
	for _, service := range snapshot.Services {
		if service.Name == p.Case.Name {
			c.addEstimates(service, p.Balancers)
		}
	}
	return nil
}

// addEstimates adds what one of the balancers infers about the servers, as its part of the mean.
func (c *counts) addEstimates(service *inspect.ServiceState, balancers int) {
	for _, server := range service.Servers {
		if server.Inferred == nil || server.Inferred.Estimate == nil {
			continue
		}
		e := server.Inferred.Estimate
		if estimate := cmp.Or(e.Capacity, e.Weight); estimate != nil {
			c.estimates[server.Name] += *estimate / float64(balancers)
		}
	}
}

// lostFrames returns how many frames the lab's switches have lost. Frames under way are not lost, so
// lostFrames reads the numbers again until there are none, or for at most a second.
func (b *rig) lostFrames() (int64, error) {
	const interval = 20 * time.Millisecond
	lost := int64(math.MaxInt64)
	for range time.Second / interval {
		in, out, err := b.lab.SwitchFrames()
		if err != nil {
			return 0, err
		}
		if lost = min(lost, int64(in-out)); lost <= 0 {
			return 0, nil
		}
		time.Sleep(interval)
	}
	return lost, nil
}

// addCounts adds to the run what was counted during it. Estimates are those at its end. Only
// servers of a case that hunts have counts of offers.
func (r *Run) addCounts(before, after *counts) {
	for reason, packets := range after.reasons {
		if n := packets - before.reasons[reason]; n > 0 {
			r.Counters[reason] = n
		}
	}
	if lost := after.lost - before.lost; lost > 0 {
		r.Warnings = append(r.Warnings, fmt.Sprintf("the switch lost %d frames: it may have been the "+
			"bottleneck; at a lower --speed, there are fewer packets at a time", lost))
	}
	for i := range r.Shares {
		s := &r.Shares[i]
		s.Estimate = after.estimates[s.Server]
		first, last := before.offers[s.Server], after.offers[s.Server]
		if first == nil || last == nil { // the case does not hunt
			continue
		}
		s.FirstThreshold, s.LastThreshold = first.Threshold, last.Threshold
		since := func(result string) uint64 { return last.Offers[result] - first.Offers[result] }
		s.Accepted = last.Accepted - first.Accepted
		s.Refused = since("refused") + since("refused_down")
		s.Returned, s.TakenBack = since("returned"), since("taken_back")
		s.Forced = since("forced")
	}
}
