// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/poll"
)

// sampleInterval is the time between two samples of the counters of servers.
const sampleInterval = 20 * time.Millisecond

// inference keeps the prices of servers up to date, for all services that infer. The data path then
// gives new flows to the servers with the lowest scores. It continues with the last prices if the
// process ends, and the next process continues with the last estimates.
//
// The goroutine in run samples counters and computes prices. Other goroutines may call all other
// methods. Only these methods change which servers there are.
type inference struct {
	log    *slog.Logger
	plane  *dataplane.Plane
	poller *poll.Poller
	// changed wakes run after services were added or removed.
	changed chan struct{}

	mu      sync.Mutex // protects all that follows
	byName  map[string]*inferred
	problem string // why prices or estimates could not be written at the last try; empty: they were
}

// inferred is a service that infers.
type inferred struct {
	name      string
	estimator *infer.Estimator
	settings  infer.Settings
	interval  time.Duration // between two steps
	names     []string      // of servers, by index of the estimator
	slots     []uint32      // of servers, by this index
	polled    []polled      // by this index; empty: the service does not poll
	suspects  []string      // names of servers that seem ill
	// sampled, stepped and asked are the times of the last sample, of the last step and of the last
	// polls; zero: none yet.
	sampled, stepped, asked time.Time
}

func newInference(plane *dataplane.Plane, log *slog.Logger) *inference {
	return &inference{
		log: log, plane: plane, poller: poll.NewPoller(), changed: make(chan struct{}, 1),
		byName: map[string]*inferred{},
	}
}

// run samples and computes until the context ends. It begins when ready is closed. Without services
// that infer it does nothing.
func (n *inference) run(ctx context.Context, ready <-chan struct{}) error {
	select {
	case <-ctx.Done():
		return nil
	case <-ready:
	}
	ticker := time.NewTicker(sampleInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.changed:
			ticker.Reset(sampleInterval)
		case now := <-ticker.C:
			if !n.tick(now) {
				ticker.Stop()
			}
		}
	}
}

// tick samples the counters of all servers, and makes the steps that are due. It returns false if
// there are no services.
func (n *inference) tick(now time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, in := range n.byName {
		in.sample(n.plane.Loads, now)
		if hasAnswers := n.poll(in, now); hasAnswers || now.Sub(in.stepped) >= in.interval {
			n.logProblem(n.step(in, now))
		}
	}
	return len(n.byName) > 0
}

// sample passes the counters of all servers to the estimator.
func (in *inferred) sample(loads *dataplane.LoadTable, now time.Time) {
	seconds := since(in.sampled, now)
	in.sampled = now
	for i, slot := range in.slots {
		in.estimator.Sample(i, loads.Counters(slot), seconds)
	}
}

// since returns the time from one moment to another in seconds. If the first one is the zero time,
// it returns 0.
func since(then, now time.Time) float64 {
	if then.IsZero() {
		return 0
	}
	return now.Sub(then).Seconds()
}

// step computes new prices, puts them in force, and stores the estimates for the next process.
func (n *inference) step(in *inferred, now time.Time) error {
	if in.estimator.Timing() != infer.TimingNone {
		durations := make([]float64, 0, infer.ReservoirSize)
		for i, slot := range in.slots {
			in.estimator.Observe(i, n.plane.Loads.Durations(slot, durations))
		}
	}
	in.estimator.Step(since(in.stepped, now), rand.Uint64())
	in.stepped = now
	for i, slot := range in.slots {
		n.plane.Loads.SetPrice(slot, in.estimator.Price(i))
		n.plane.Loads.Try(slot, in.estimator.Trials(i))
	}
	if err := n.plane.Rankings.Rank(in.slots); err != nil {
		return err
	}
	return n.save(in)
}

// save stores the estimates of a service's servers.
func (n *inference) save(in *inferred) error {
	now, err := dataplane.BootTime()
	if err != nil {
		return err
	}
	for i, slot := range in.slots {
		r := in.estimator.Report(i)
		n.logConduct(in, in.names[i], &r)
		e := &dataplane.Estimate{
			Time: now, Capacity: r.Capacity, Weight: r.Weight, Wait: r.Wait, Duration: r.Duration,
			SlowStart: r.SlowStart, NoAnswers: r.NoAnswers, SilentFlows: r.SilentFlows,
			State: in.estimator.Save(i),
		}
		if len(in.polled) > 0 {
			e.Told, e.ToldAt = in.polled[i].load, now-time.Since(in.polled[i].heard)
		}
		n.plane.Estimates.Add(slot, e)
	}
	return n.plane.Estimates.Put()
}

// logConduct logs that a server begins or ends to seem ill.
func (n *inference) logConduct(in *inferred, server string, r *infer.Report) {
	at := slices.Index(in.suspects, server)
	about := []any{"service", in.name, "server", server}
	// Each of these factors is 1 while the server seems well in this respect, and higher otherwise.
	switch isSuspect := r.NoAnswers*r.SilentFlows > 1; {
	case isSuspect == (at >= 0): // nothing has changed
	case isSuspect && r.NoAnswers >= r.SilentFlows:
		in.suspects = append(in.suspects, server)
		n.log.Warn("a server seems ill: it gets few new flows", append(about, "reason",
			"its clients send a second packet less often than those of other servers: "+
				"it may refuse or lose connections")...)
	case isSuspect:
		in.suspects = append(in.suspects, server)
		n.log.Warn("a server seems ill: it gets few new flows", append(about, "reason",
			"its flows fall silent, while those of other servers end: "+
				"it may reset connections, or say nothing")...)
	default:
		in.suspects = slices.Delete(in.suspects, at, at+1)
		n.log.Info("a server seems well again", about...)
	}
}

// logProblem logs an error, unless it has the text of the error of the last call. A call with nil
// ends this, so that the same error is logged again.
func (n *inference) logProblem(err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	if problem != n.problem && err != nil {
		n.log.Error("infer the loads of servers", "error", err)
	}
	n.problem = problem
}

// arrange makes a service infer with its present members, and sets their prices. What is known of a
// member stays while the member has its slot, also if an earlier process has found it out. A member
// of which nothing is known begins slowly, unless nothing is known of any member. arrange returns
// an error if an estimate cannot be read.
func (n *inference) arrange(svc *service, node *desired.BalancerNode) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	in, err := n.of(svc)
	if err != nil {
		return err
	}
	servers := make([]infer.WeightedServer, len(svc.members))
	for i, m := range svc.members {
		servers[i] = infer.WeightedServer{Name: m.Name, Weight: float64(*m.Weight)}
	}
	if err := in.estimator.Arrange(servers, node.Balancers(), node.Name); err != nil {
		return err
	}
	slotOf := map[string]uint32{}
	for i, name := range in.names {
		slotOf[name] = in.slots[i]
	}
	in.names, in.slots = in.names[:0], svc.slots()
	for _, m := range svc.members {
		in.names = append(in.names, m.Name)
		n.plane.SetTiming(m.slot, in.estimator.Timing())
	}
	in.suspects = slices.DeleteFunc(in.suspects, func(name string) bool {
		return !slices.Contains(in.names, name)
	})
	n.arrangePolls(in, svc)
	return n.welcome(in, slotOf)
}

// of returns the inference of a service. If there is none, or if the settings of its estimator have
// changed, of makes a new one. A new one keeps only the polled servers of the one before.
func (n *inference) of(svc *service) (*inferred, error) {
	settings := infer.Settings{
		Kind: infer.Kind(svc.EstimatorName()), SlowStart: svc.slowStart().Seconds(),
		Silent: svc.Timeouts.Silent.Seconds(),
	}
	in := n.byName[svc.Name]
	if in == nil || in.settings != settings {
		estimator, err := infer.NewEstimator(settings)
		if err != nil {
			return nil, err
		}
		in = &inferred{
			name: svc.Name, estimator: estimator, settings: settings, polled: in.polledServers(),
		}
		n.byName[svc.Name] = in
		n.wake()
	}
	in.interval = cmp.Or(svc.Infer.Poll, svc.Infer.Interval, desired.DefaultInferInterval)
	return in, nil
}

// slowStart returns the time of the service's slow starts, or 0 if the desired state has none.
// Package desired has set the default already.
func (svc *service) slowStart() time.Duration {
	if svc.Infer.SlowStart == nil {
		return 0
	}
	return *svc.Infer.SlowStart
}

// polledServers returns the servers that an inference polls: none if there is no inference.
func (in *inferred) polledServers() []polled {
	if in == nil {
		return nil
	}
	return in.polled
}

// wake makes run sample again: run stops sampling when there are no services.
func (n *inference) wake() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// welcome restores the estimates of servers that are new to this inference, and sets their prices.
// slotOf has the slots that the servers had before, by name. A server is known if it had its slot
// before, or if an earlier process has left its estimate. If some of the servers are known, or the
// service had servers before, those that are not known begin slowly. A known server that has a
// price keeps it until the next step.
func (n *inference) welcome(in *inferred, slotOf map[string]uint32) error {
	isKnown := make([]bool, len(in.slots))
	for i, slot := range in.slots {
		before, wasThere := slotOf[in.names[i]]
		isKnown[i] = wasThere && before == slot
		if isKnown[i] {
			continue
		}
		var err error
		if isKnown[i], err = n.restore(in, i); err != nil {
			return err
		}
	}
	anyKnown := slices.Contains(isKnown, true)
	for i, slot := range in.slots {
		if !isKnown[i] && (anyKnown || len(slotOf) > 0) {
			in.estimator.Forget(i)
		}
		if !isKnown[i] || n.plane.Loads.Price(slot).Unit == 0 {
			n.plane.Loads.SetPrice(slot, in.estimator.Price(i))
		}
	}
	return nil
}

// restore restores the estimate of a server from the table, and the load that the server has told.
// It returns false if there is no estimate, or if it is that of another estimator. It returns an
// error if the table or the clock cannot be read.
func (n *inference) restore(in *inferred, server int) (ok bool, err error) {
	estimate, ok, err := n.plane.Estimates.Of(in.slots[server])
	if !ok || err != nil {
		return false, err
	}
	now, err := dataplane.BootTime()
	if err != nil {
		return false, err
	}
	if len(in.polled) > 0 {
		in.polled[server].recall(&estimate, now, in.interval)
	}
	age := (now - estimate.Time).Seconds()
	return in.estimator.Restore(server, estimate.State[:], max(0, age)) == nil, nil
}

// admitted must be called when other members of a service than before take new flows. It ranks the
// members again. Members that begin to take new flows again begin slowly.
func (n *inference) admitted(svc *service) {
	n.mu.Lock()
	defer n.mu.Unlock()
	in := n.byName[svc.Name]
	if in == nil {
		return
	}
	for _, m := range svc.members {
		takes := n.plane.Servers.TakesFlows(m.slot)
		// A reload that failed may have left in.slots without a new member.
		if i := slices.Index(in.slots, m.slot); takes && !m.took && i >= 0 {
			in.estimator.Restart(i)
			n.plane.Loads.SetPrice(m.slot, in.estimator.Price(i))
		}
		m.took = takes
	}
	n.logProblem(n.plane.Rankings.Rank(in.slots))
}

// remove ends the inference of a service, if it infers.
func (n *inference) remove(service string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if in := n.byName[service]; in != nil {
		for _, p := range in.polled {
			n.poller.Forget(p.target.ID)
		}
	}
	delete(n.byName, service)
}
