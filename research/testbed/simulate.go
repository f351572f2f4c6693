// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"context"
	"regexp"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/research/model"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/sim/placement"
)

// simulations is the number of times that the simulator replays the arrivals of a run. Each time it
// draws other hashes of the flows and breaks ties in another way, and so chooses other servers.
const simulations = 10

// workOf finds the work in a query, in milliseconds.
var workOf = regexp.MustCompile(`work=([0-9.]+)ms$`)

// simulate replays the arrivals of a run. It returns nil for cases that the simulator does not
// have.
func (p planned) simulate(ctx context.Context, arrivals string) (*Response, error) {
	spec := p.spec()
	if spec == nil {
		return nil, nil
	}
	return p.replay(ctx, arrivals, spec)
}

// bound replays the arrivals of a run with an omniscient balancer, which knows the requests on all
// servers: each request goes to the server with the shortest expected delay. If clients are
// distant, the balancer also knows the requests that are on the way. The result has no
// distribution.
func (p planned) bound(ctx context.Context, arrivals string) (*Response, error) {
	spec := &placement.GSED{}
	if p.roundTrip() != nil {
		spec.Count = placement.CountPlaced
	}
	r, err := p.replay(ctx, arrivals, spec)
	if err != nil {
		return nil, err
	}
	r.Distribution = nil
	return r, nil
}

// replay replays arrivals in the simulator with a placement, several times (simulations). The
// result sums up all replays.
func (p planned) replay(
	ctx context.Context, arrivals string, spec placement.Spec,
) (*Response, error) {
	method, policy, err := spec.Build()
	if err != nil {
		return nil, err
	}
	servers, large := p.simulatedServers(), p.newTally()
	const secondsPerUnit = 1e-3 // the trace has the work in milliseconds
	config := &sim.Config{
		Servers:   servers,
		Balancers: slices.Repeat([]sim.Share{{Weight: 1}}, p.Balancers),
		Jobs:      []sim.Job{{Stages: []sim.Stage{{Queue: sim.CPU, PerUnit: secondsPerUnit}}}},
		Arrivals: sim.Trace{
			File: arrivals, Format: sim.TimedQueries, MustMatch: true,
			Classes: []sim.TraceClass{{Match: workOf, Sized: true}},
		},
		Placement: method, Policy: policy,
		Network: p.network(),
		Events:  p.slowdowns(), Completed: large.completed(servers),
	}
	result, err := sim.Run(ctx, config, sim.Options{Seed: p.seed, Runs: simulations})
	if err != nil {
		return nil, err
	}
	r := &Response{
		Mean: result.Mean().Value, Half: result.Mean().Half, P50: result.Quantile(0.5).Value,
		P90: result.Quantile(0.9).Value, P99: result.Quantile(0.99).Value,
	}
	for i := 1; i < 200; i++ {
		share := float64(i) / 200
		r.Distribution = append(r.Distribution,
			DistributionPoint{result.Response.Quantile(share), share})
	}
	large.setLarge(r)
	return r, nil
}

// network returns the delays of the simulated network. Requests have none. Replies have the whole
// round trip of their client.
func (p planned) network() (n sim.Network) {
	if trip := p.roundTrip(); trip != nil {
		n.ServerClient = *trip
	}
	return n
}

// simulatedServers returns the servers of a run for the simulator. They have the speeds of the
// file, because the simulator works in emulated time.
func (p planned) simulatedServers() (servers []sim.Server) {
	for i := 1; i <= p.present; i++ {
		e := p.Emulated.Of(serverName(i))
		servers = append(servers, sim.Server{
			Name: serverName(i), CPUs: int32(e.Cores), Speed: speedOf(e), IOSpeed: 1,
			Discipline: disciplineOf(e), Workers: int32(e.Workers), Backlog: int32(e.Backlog),
		})
	}
	return servers
}

func disciplineOf(e lab.EmulatedServer) sim.Discipline {
	if e.Discipline == "fifo" {
		return sim.FIFO
	}
	return sim.ProcessorSharing
}

// spec returns the simulator's placement for the case, or nil if the simulator has none. The first
// condition that is true decides.
func (p planned) spec() placement.Spec {
	switch c := p.Case; {
	case c.hasProxy():
		return c.proxy()
	case c.Weights != nil: // simulated balancers know the servers' own capacities
		return nil
	case c.Placement == desired.PlacementAWCMP:
		return &placement.AWCMP{Polled: placement.Polled{Interval: c.poll()}}
	case c.Placement.Infers():
		return p.inferring()
	case c.Weighted && c.Placement == desired.PlacementHash:
		return &placement.WCMP{}
	case c.Weighted && !c.huntsByTable():
		return nil // the simulator has no other placement by hash with weights
	case c.Selection.OrdersByReports() && c.policy() != desired.AcceptLeast:
		return nil // the simulator has reports only with this policy
	case c.Direct:
		return &placement.ECMP{}
	case c.Placement == desired.PlacementRoundRobin && c.Feedback > 0:
		return &placement.WeightedRoundRobin{
			Polled: placement.Polled{Interval: c.Feedback}, Formula: placement.Formula6LB,
		}
	case c.Placement == desired.PlacementRoundRobin:
		return &placement.RoundRobin{}
	case c.Placement == desired.PlacementHash:
		return &placement.Hash{Candidates: 1, Buckets: p.Buckets}
	case c.Placement == desired.PlacementHunt && c.policy() == desired.AcceptStatic:
		spec := &placement.SR{Threshold: int(*c.Accept.Threshold)}
		p.setHunt(&spec.Hunt)
		return spec
	case c.Placement == desired.PlacementHunt && c.policy() == desired.AcceptDynamic:
		spec := &placement.SRDyn{Window: 50, Epsilon: 0.1, Initial: 1, WindowTime: c.windowTime()}
		p.setHunt(&spec.Hunt)
		if c.Accept.Window > 0 {
			spec.Window = int(c.Accept.Window)
		}
		if c.Accept.Epsilon != nil {
			spec.Epsilon = *c.Accept.Epsilon
		}
		if c.Accept.Initial != nil {
			spec.Initial = int(*c.Accept.Initial)
		}
		return spec
	case c.Placement == desired.PlacementHunt && c.policy() == desired.AcceptLeast &&
		c.hasCoresAsCapacity():
		spec := &placement.Least{}
		p.setHunt(&spec.Hunt)
		p.setReports(spec)
		return spec
	}
	return nil
}

// hasCoresAsCapacity tells whether the servers' capacities are their numbers of cores, as in the
// simulator.
func (c Case) hasCoresAsCapacity() bool {
	reported := []desired.LoadSource{"", desired.LoadSharedMemory, desired.LoadSharedMap}
	return slices.Contains(reported, c.Source.Kind) && c.Source.Capacity == 0
}

// proxy returns the simulator's placement for a case with a proxy: a proxy knows its own requests,
// from their arrival on. The result is nil if requests wait in the proxy.
func (c Case) proxy() placement.Spec {
	if c.Proxy.Maxconn > 0 {
		return nil
	}
	own := placement.Own{Count: placement.CountPlaced}
	if c.Proxy.Algorithm == lab.ProxyRandom2 {
		own.Choices = 2
	}
	return &placement.LeastQueue{Own: own}
}

// samplePeriod is the time by the clock between two samples of the counters in a balancer.
const samplePeriod = 20 * time.Millisecond

// inferring returns the simulator's placement for a case that infers. Simulated balancers know the
// servers' capacities if the estimator needs them. In the lab, balancers know them if the case is
// weighted. The result is nil if these two differ, if the balancers poll, or if they do not compare
// all servers.
func (p planned) inferring() placement.Spec {
	kind := p.Case.estimator()
	needsCapacities := kind == infer.SED || kind == infer.TerritoryConfigured
	i := p.Case.infer(p.settings)
	comparesAll := i.Among == "" || i.Among == desired.AmongAll
	if needsCapacities != p.Case.Weighted || !comparesAll || kind.IsPolled() {
		return nil
	}
	emulated := func(byTheClock time.Duration) time.Duration {
		return time.Duration(float64(byTheClock) * p.Speed)
	}
	slowStart := desired.DefaultSlowStart
	return &placement.Infer{
		Kind: kind, Polled: emulated(samplePeriod),
		Interval:  emulated(cmp.Or(i.Interval, desired.DefaultInferInterval)),
		SlowStart: emulated(*cmp.Or(i.SlowStart, &slowStart)),
		Silent:    emulated(desired.DefaultSilent),
	}
}

// estimator returns the method by which a case that infers finds prices.
func (c Case) estimator() infer.Kind {
	switch {
	case c.Placement != desired.PlacementInfer:
		return infer.Kind(c.Placement)
	case c.Infer == nil:
		return infer.TerritoryLearned
	}
	estimator := cmp.Or(c.Infer.Estimator.Method().StandsFor, c.Infer.Estimator)
	return cmp.Or(infer.Kind(estimator), infer.TerritoryLearned)
}

// The data path has these settings for load reports. They are repeated here for the simulator.
const (
	// reportAge is the time by the clock in which the weight of a report falls to 1/e.
	reportAge = 200 * time.Millisecond
	// offeredByReports is the number of candidates to which a flow is offered.
	offeredByReports = 3
	// spareServers is the number of free servers that a balancer remembers.
	spareServers = 4
)

// setReports lets the balancers use load reports as the data path does, if the case uses reports.
func (p planned) setReports(l *placement.Least) {
	if !p.Case.Selection.OrdersByReports() {
		return
	}
	l.Chain = min(offeredByReports, l.Candidates)
	l.Reports, l.ReportOthers, l.Coded = true, placement.ReportFirst, true
	l.Age = time.Duration(float64(reportAge) * p.Speed) // in emulated time
	if p.Case.Selection == desired.SelectSpare {
		l.Spare = spareServers
	}
}

// policy returns the accept policy of the servers, or the default.
func (c Case) policy() desired.AcceptPolicy {
	return cmp.Or(c.Accept.Policy, desired.DefaultAcceptPolicy)
}

// candidates returns the number of servers of a bucket, or its default.
func (c Case) candidates() int {
	return cmp.Or(c.Candidates, c.Selection.DefaultCandidates())
}

func (p planned) setHunt(h *placement.Hunt) {
	h.Candidates, h.Buckets = p.Case.candidates(), p.Buckets
	h.Random, h.Weighted = p.Case.Selection == desired.SelectRandom, p.Case.Weighted
}

// huntsByTable tells whether the case offers flows to the candidates of their buckets.
func (c Case) huntsByTable() bool {
	return c.Placement == desired.PlacementHunt && c.Selection != desired.SelectRandom
}

// model returns the mean response time of the model at the run's load, or nil if the model does not
// describe the run.
func (p planned) model() (*Response, error) {
	load := p.actualLoad()
	switch {
	case p.deviation != 0 || p.Replay != nil || !isExponential(p.Work), // other work
		p.roundTrip() != nil,           // distant clients
		len(p.Emulated.Exceptions) > 0, // unequal servers
		p.Emulated.Colocated != "",     // servers whose speed changes
		p.Axis == AxisBuckets,          // small tables, in which servers have unequal shares
		load >= 1:                      // no steady state
		return nil, nil
	}
	var steady *model.Steady
	var err error
	switch c := p.Case; {
	case c.Direct || c.Placement == desired.PlacementHash:
		steady, err = model.SingleChoice(load, p.Emulated.Cores)
	case c.Placement == desired.PlacementHunt && c.policy() == desired.AcceptStatic &&
		c.candidates() == 2:
		steady, err = model.SRc(load, p.Emulated.Cores, int(*c.Accept.Threshold))
	default:
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	service := p.work().Mean() / speedOf(p.Emulated.EmulatedServer)
	return &Response{Mean: steady.MeanResponse() * service}, nil
}

func isExponential(work string) bool { return regexp.MustCompile(`^\s*exponential`).MatchString(work) }
