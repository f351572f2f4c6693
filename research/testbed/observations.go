// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
)

// Observations tells how far the balancers of a run differ in what they see of the same servers
// (HLB, section VI-C3, figure 16b). Each value is the standard deviation of the observations of all
// balancers, at all steps. An observation is relative: if a balancer sees of a server what all
// balancers see of it in the mean, the observation is 1. So the value is 0 for a single balancer.
type Observations struct {
	// Flows is about the numbers of established flows.
	Flows float64 `json:"flows"`
	// Durations is about the mean durations of flows.
	Durations float64 `json:"durations"`
}

// observer reads what the balancers of a run see of its servers, at the interval of the estimates.
// A run that has a single balancer, or whose balancers do not infer, has a nil observer.
type observer struct {
	cancel           context.CancelFunc
	done             chan struct{}
	views            []*inspect.View
	flows, durations spread
	err              error
}

// startObserver starts to read what the balancers see.
func (b *rig) startObserver(p planned) (o *observer, err error) {
	if p.Case.Placement != desired.PlacementInfer || p.Balancers < 2 {
		return nil, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	o = &observer{cancel: cancel, done: make(chan struct{})}
	for _, n := range b.lab.Nodes {
		if n.Role != lab.RoleBalancer {
			continue
		}
		view, err := inspect.OpenView(n.Instance())
		if err != nil {
			cancel()
			return nil, errors.Join(fmt.Errorf("%s: %w", n.Name, err), o.close())
		}
		o.views = append(o.views, view)
	}
	interval := p.Case.infer(p.settings).Interval
	go func() {
		defer close(o.done)
		o.err = p.whileArriving(ctx, interval, func(time.Duration) error { return o.observe(p.Case.Name) })
	}()
	return o, nil
}

// stop ends the observation, and returns its result: nil if the balancers have seen too little.
func (o *observer) stop() (*Observations, error) {
	if o == nil {
		return nil, nil
	}
	o.cancel()
	<-o.done
	if err := errors.Join(o.err, o.close()); err != nil || o.flows.n == 0 || o.durations.n == 0 {
		return nil, err
	}
	return &Observations{Flows: o.flows.deviation(), Durations: o.durations.deviation()}, nil
}

func (o *observer) close() (err error) {
	for _, view := range o.views {
		err = errors.Join(err, view.Close())
	}
	return err
}

// observe adds one step. A duration that a balancer does not know yet counts as 0.
func (o *observer) observe(service string) error {
	flows, durations := make([][]float64, len(o.views)), make([][]float64, len(o.views))
	for i, view := range o.views {
		s, err := view.List(func(name string) bool { return name == service })
		if err != nil {
			return err
		}
		if len(s.Services) != 1 {
			return fmt.Errorf("balancer %d: %d services have the name %s", i+1, len(s.Services), service)
		}
		for _, server := range s.Services[0].Servers {
			duration := 0.0
			if e := server.Inferred.Estimate; e != nil && e.Duration != nil {
				duration = *e.Duration
			}
			flows[i] = append(flows[i], float64(server.Inferred.Established))
			durations[i] = append(durations[i], duration)
		}
	}
	o.flows.add(flows)
	o.durations.add(durations)
	return nil
}

// spread is the deviation of relative observations from their mean, which is 1.
type spread struct {
	n       int
	squares float64
}

// add adds one step: measurements by balancer and server. HLB normalises a measurement x of server
// j by balancer i over the servers, as z = x/sum_j(x), and then over the M balancers, as
// M z/sum_i(z). A balancer that has measured nothing has no share, and so the step does not count.
// Neither does a server of which no balancer has measured anything.
func (s *spread) add(measured [][]float64) {
	shares := make([][]float64, len(measured))
	for i, of := range measured {
		all := sum(of)
		if all == 0 {
			return
		}
		for _, x := range of {
			shares[i] = append(shares[i], x/all)
		}
	}
	for j := range shares[0] {
		all := 0.0
		for i := range shares {
			all += shares[i][j]
		}
		if all == 0 {
			continue
		}
		for i := range shares {
			d := float64(len(shares))*shares[i][j]/all - 1
			s.squares += d * d
			s.n++
		}
	}
}

// deviation returns the standard deviation.
func (s *spread) deviation() float64 { return math.Sqrt(s.squares / float64(s.n)) }
