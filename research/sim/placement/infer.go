// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"math"
	"strconv"
	"time"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/research/sim"
)

// Infer does what the balancer does: an infer.Estimator polls the counters of the data path, and
// the data path ranks servers by the fixed-point prices of the estimator.
type Infer struct {
	// Kind is the kind of the estimator.
	Kind infer.Kind `yaml:"kind"`
	// Polled is the time between two samples of the counters, 1 ms to 1 h.
	Polled time.Duration `yaml:"polled"`
	// Interval is the time between two steps of the estimator, Polled to 1 h. It is rounded down to
	// a multiple of Polled.
	Interval time.Duration `yaml:"interval"`
	// SlowStart is the time in which an added server comes to its full share, 0 to 1 h.
	SlowStart time.Duration `yaml:"slow-start"`
	// Silent is the time after which a flow without packets does not count, 1 ms to 1 h.
	Silent time.Duration `yaml:"silent"`
}

func inferDefaults() *Infer {
	return &Infer{
		Kind: infer.TerritoryLearned, Polled: 20 * time.Millisecond, Interval: defaultInterval,
		SlowStart: infer.DefaultSlowStart * time.Second, Silent: 10 * time.Second,
	}
}

// Build implements Spec.
func (m *Infer) Build() (sim.Method, sim.Policy, error) {
	return m, nil, errors.Join(
		oneOf("kind", m.Kind, append([]infer.Kind{infer.TerritoryLearned}, infer.Kinds()...)...),
		inRange("polled", m.Polled, time.Millisecond, time.Hour),
		inRange("interval", m.Interval, m.Polled, time.Hour),
		inRange("slow-start", m.SlowStart, 0, time.Hour),
		inRange("silent", m.Silent, time.Millisecond, time.Hour),
	)
}

// New implements sim.Method. Each balancer has its own estimator and its own counters.
func (m *Infer) New(b *sim.Balancer) (sim.Placement, error) {
	n := len(b.Servers)
	if n > mostServers {
		return nil, errors.New("too many servers: at most " + strconv.Itoa(mostServers))
	}
	e, err := infer.NewEstimator(infer.Settings{
		Kind: m.Kind, SlowStart: m.SlowStart.Seconds(), Silent: m.Silent.Seconds(),
	})
	if err != nil {
		return nil, err
	}
	p := &inferring{
		b: b, method: m, estimator: e, counters: make([]infer.Counters, n),
		durations: make([]infer.Reservoir, n), flows: newAlgorithm1(b),
	}
	return p, p.arrange()
}

type inferring struct {
	b         *sim.Balancer
	method    *Infer
	estimator *infer.Estimator
	live      []int32           // servers by index of the estimator
	counters  []infer.Counters  // by server
	durations []infer.Reservoir // by server
	flows     algorithm1        // with infer.TimingPackets
	polls     int
}

// arrange tells the estimator which servers and balancers there are.
func (p *inferring) arrange() error {
	p.live = append(p.live[:0], p.b.Live...)
	servers := make([]infer.WeightedServer, len(p.live))
	for i, s := range p.live {
		servers[i] = infer.WeightedServer{Name: p.b.Servers[s].Name, Weight: p.b.Servers[s].Capacity()}
	}
	names := make([]string, len(p.b.Peers))
	for i, peer := range p.b.Peers {
		names[i] = balancerName(peer)
	}
	return p.estimator.Arrange(servers, names, balancerName(int32(p.b.Index)))
}

func balancerName(index int32) string { return "balancer " + strconv.Itoa(int(index)) }

func (p *inferring) MembershipChanged() { must(p.arrange()) }

// Place takes the live server with the lowest score. Without live servers, it makes no offer.
func (p *inferring) Place(f *sim.Flow, offer *sim.Offer) {
	best, least := int32(-1), uint64(math.MaxUint64)
	for i, s := range p.live {
		c := &p.counters[s]
		score := p.estimator.Price(i).Score(c.Established, c.New, uint16(s))
		if score < least {
			best, least = s, score
		}
	}
	if best < 0 {
		return
	}
	offer.Set(best)
	p.placed(f, best)
	if p.timing() == infer.TimingPackets {
		p.flows.opened(f)
	}
}

func (p *inferring) timing() infer.Timing { return p.estimator.Timing() }

// registerAsPrinted registers a duration of algorithm 1.
func (p *inferring) registerAsPrinted(server int32, duration float64) {
	p.durations[server].AddAsPrinted(duration, p.b.Rand.Uint64(), infer.ReservoirSize)
}

// placed counts a flow as new on a server.
func (p *inferring) placed(f *sim.Flow, server int32) {
	state, _ := infer.Null.Next(infer.Open)
	mark(f, state, server)
	p.counters[server].Placed++
	p.counters[server].New++
}

// Connected counts a flow as established instead of new. A flow that came from another balancer is
// first counted as placed.
func (p *inferring) Connected(f *sim.Flow) {
	state, server := marked(f)
	if state == infer.Null {
		p.placed(f, server)
		state, _ = marked(f)
	}
	if state == infer.Syn {
		c := &p.counters[server]
		c.New--
		c.Established++
		c.Answered++
	}
	state, _ = state.Next(infer.Data)
	mark(f, state, server)
	p.flows.connected(f, p.registerAsPrinted)
}

// silent is the state of a flow that does not count, because it has been silent.
const silent = infer.Conn + 1

// SilentAfter implements sim.Silencer.
func (p *inferring) SilentAfter() float64 { return p.method.Silent.Seconds() }

// Silent implements sim.Silencer.
func (p *inferring) Silent(f *sim.Flow) {
	if state, server := marked(f); state == infer.Conn {
		p.counters[server].Established--
		mark(f, silent, server)
		p.flows.forget(f)
	}
}

// Closed removes a flow from the counters. If the flow was established, Closed also counts its end
// and its duration. It first counts a silent flow again, because the flow is not silent when its
// last packet passes. It does nothing for a flow that this balancer has not counted.
func (p *inferring) Closed(f *sim.Flow, end sim.End) {
	state, server := marked(f)
	defer p.flows.forget(f)
	if state == infer.Null {
		return
	}
	c := &p.counters[server]
	if state == silent {
		c.Established++
	}
	if state == infer.Syn {
		c.New--
		return
	}
	c.Ended[min(c.Established, infer.MostServed)-1]++ // by the server's number of flows, this included
	c.Established--
	switch p.timing() {
	case infer.TimingPackets:
		p.flows.ended(f, p.registerAsPrinted)
	case infer.TimingEnds:
		p.durations[server].Add(end.Duration, p.b.Rand.Uint64())
	}
}

func (p *inferring) Interval() float64 { return p.method.Polled.Seconds() }

// Step samples the counters. Each time that Interval has passed, it also steps the estimator, with
// the durations of ended flows if the estimator uses them.
func (p *inferring) Step() {
	for i, s := range p.live {
		p.estimator.Sample(i, p.counters[s], p.Interval())
	}
	p.polls++
	every := int(p.method.Interval / p.method.Polled) // polls in a step
	if p.polls%every != 0 {
		return
	}
	if p.timing() != infer.TimingNone {
		for i, s := range p.live {
			p.estimator.Observe(i, p.durations[s].Durations())
		}
	}
	p.estimator.Step(float64(every)*p.Interval(), p.b.Rand.Uint64())
}
