// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/research/sim"
)

// Prequal is the rule of "Load is not what you should balance: Introducing Prequal" (Wydrowski,
// Kleinberg, Rumble and Archer, NSDI 2024). With each flow a balancer sends probes. It keeps the
// answers in a pool, uses each several times, and chooses among them by the hot-cold lexicographic
// rule. The paper's rules for changes of the servers are left out, because the paper does not
// state them.
type Prequal struct {
	// Probes is the number of random servers that are probed with each flow, the paper's r_probe.
	// It must be above 0, and may be less than 1.
	Probes float64 `yaml:"probes"`
	// Remove is the number of answers that are removed with each flow, r_remove.
	Remove float64 `yaml:"remove"`
	// Pool is the maximum number of answers in the pool.
	Pool int `yaml:"pool"`
	// Age is the age at which an answer is removed, 1 ms to 1 h.
	Age time.Duration `yaml:"age"`
	// Quantile is Q_RIF, 0 to 1: a server is hot if it has more flows in flight than this quantile
	// of recent answers. With 1 no server is hot, and only latencies decide.
	Quantile float64 `yaml:"quantile"`
	// Delta is the parameter of the paper by which answers arrive in the pool a little faster than
	// they leave.
	Delta float64 `yaml:"delta"`
}

// prequalDefaults returns the parameters of the paper's experiments.
func prequalDefaults() *Prequal {
	return &Prequal{
		Probes: 3, Remove: 1, Pool: 16, Age: time.Second, Quantile: math.Pow(2, -0.25), Delta: 1,
	}
}

// Build implements Spec.
func (m *Prequal) Build() (sim.Method, sim.Policy, error) {
	return m, latencyPolicy{}, errors.Join(
		inRange("probes", m.Probes, 0.001, 100), inRange("remove", m.Remove, 0, 100),
		inRange("pool", m.Pool, 1, 1000), inRange("age", m.Age, time.Millisecond, time.Hour),
		inRange("quantile", m.Quantile, 0, 1), inRange("delta", m.Delta, 0, 100),
	)
}

// New implements sim.Method.
func (m *Prequal) New(b *sim.Balancer) (sim.Placement, error) {
	return &prequal{m: m, b: b}, nil
}

// answer is an answer to a probe.
type answer struct {
	server  int32
	uses    int32 // remaining uses
	flight  int32 // flows in flight
	latency float64
	when    float64
}

// recentAnswers is the number of answers from which the quantile is computed.
const recentAnswers = 128

type prequal struct {
	m      *Prequal
	b      *sim.Balancer
	pool   []answer // the oldest first
	recent [recentAnswers]int32
	seen   int     // number of all answers so far
	owed   float64 // probes to send; the fraction is left for later flows
	remove float64 // answers to remove; the fraction is left for later flows
	worst  bool    // whether to remove the worst answer next, and not the oldest
	sorted [recentAnswers]int32
}

// Place chooses among the answers in the pool. Then it removes answers and sends probes.
func (p *prequal) Place(_ *sim.Flow, offer *sim.Offer) {
	if len(p.b.Live) == 0 {
		return
	}
	p.expire()
	// With fewer than two answers there is no choice. The clients in the paper then choose at
	// random.
	if len(p.pool) < 2 {
		offer.Set(p.b.Live[p.b.Rand.Intn(len(p.b.Live))])
	} else {
		offer.Set(p.use(p.choose(false)))
	}
	for p.remove += p.m.Remove; p.remove >= 1; p.remove-- {
		p.removeOne()
	}
	for p.owed += p.m.Probes; p.owed >= 1; p.owed-- {
		p.b.Probe(p.b.Live[p.b.Rand.Intn(len(p.b.Live))])
	}
}

// expire removes answers that are too old.
func (p *prequal) expire() {
	p.pool = slices.DeleteFunc(p.pool, func(a answer) bool { return p.b.Now()-a.when > p.m.Age.Seconds() })
}

// use returns the server of an answer, and adds the new flow to the answer's flows in flight. It
// removes the answer from the pool after its last use.
func (p *prequal) use(at int) int32 {
	a := &p.pool[at]
	server := a.server
	a.flight++
	if a.uses--; a.uses <= 0 {
		p.pool = slices.Delete(p.pool, at, at+1)
	}
	return server
}

// choose returns the index of the best answer, or of the worst one. Cold answers come first, in
// the order of latencies. Hot answers follow, in the order of flows in flight.
func (p *prequal) choose(worst bool) int {
	hot, chosen := p.hot(), 0
	for i := 1; i < len(p.pool); i++ {
		if better := p.pool[i].before(&p.pool[chosen], hot); better != worst { // for worst: not better
			chosen = i
		}
	}
	return chosen
}

// before tells whether an answer is better than another one.
func (a *answer) before(other *answer, hot int32) bool {
	switch aHot, otherHot := a.flight > hot, other.flight > hot; {
	case aHot != otherHot:
		return otherHot
	case aHot:
		return a.flight < other.flight
	}
	return a.latency < other.latency
}

// hot returns the number of flows in flight above which a server is hot. Without answers, or with
// quantile 1, no server is hot.
func (p *prequal) hot() int32 {
	n := min(p.seen, recentAnswers)
	if n == 0 || p.m.Quantile == 1 {
		return math.MaxInt32
	}
	sorted := p.sorted[:n]
	copy(sorted, p.recent[:n])
	slices.Sort(sorted)
	return sorted[min(int(p.m.Quantile*float64(n)), n-1)]
}

// removeOne removes one answer: the oldest, and the next time the worst.
func (p *prequal) removeOne() {
	if len(p.pool) == 0 {
		return
	}
	at := 0
	if p.worst {
		at = p.choose(true)
	}
	p.worst = !p.worst
	p.pool = slices.Delete(p.pool, at, at+1)
}

// Probed puts an answer into the pool. If the pool is full, the answer replaces the oldest one.
func (p *prequal) Probed(server int32, load sim.Load) {
	p.recent[p.seen%recentAnswers] = load.Open
	p.seen++
	if len(p.pool) == p.m.Pool {
		p.pool = slices.Delete(p.pool, 0, 1)
	}
	p.pool = append(p.pool, answer{server, p.reuse(), load.Open, load.Latency, p.b.Now()})
}

// reuse returns how often an answer may be used, b_reuse of the paper (section 4): the number of
// uses with which the pool stays full. Between two whole numbers, reuse chooses one of them at
// random, so that the mean is right.
func (p *prequal) reuse() int32 {
	m := p.m
	uses := math.Inf(1)
	if left := (1-float64(m.Pool)/float64(len(p.b.Live)))*m.Probes - m.Remove; left > 0 {
		uses = (1 + m.Delta) / left
	}
	uses = min(max(uses, 1), math.MaxInt32-1)
	whole := math.Floor(uses)
	if p.b.Rand.Float() < uses-whole {
		whole++
	}
	return int32(whole)
}

// MembershipChanged removes the answers of servers that are not live from the pool.
func (p *prequal) MembershipChanged() {
	p.pool = slices.DeleteFunc(p.pool, func(a answer) bool {
		_, ok := slices.BinarySearch(p.b.Live, a.server)
		return !ok
	})
}

// latencyPolicy lets servers take all flows, and estimate latencies for probes.
type latencyPolicy struct{}

// New implements sim.Policy.
func (latencyPolicy) New(*sim.Host) (sim.Agent, error) { return &latencyAgent{}, nil }

const (
	latencyLevels  = 64 // larger numbers of flows count as 63
	latencySamples = 16 // per number of flows
)

// latencyAgent keeps the latest latencies by the number of flows that were in flight at the flow's
// arrival, and computes their median, as the servers in the paper do.
type latencyAgent struct {
	samples [latencyLevels][latencySamples]float64
	seen    [latencyLevels]int
}

// Decide takes the flow.
func (a *latencyAgent) Decide(_ sim.Load, offer *sim.Offer) int32 { return offer.At }

// Served stores the latency of a flow.
func (a *latencyAgent) Served(duration float64, others int32) {
	level := min(others, latencyLevels-1)
	a.samples[level][a.seen[level]%latencySamples] = duration
	a.seen[level]++
}

// Latency returns the median latency at the nearest number of flows in flight that has samples, or
// 0 without samples.
func (a *latencyAgent) Latency(own sim.Load) float64 {
	level := min(own.Open, latencyLevels-1)
	for distance := range int32(latencyLevels) {
		for _, at := range [2]int32{level - distance, level + distance} {
			if at >= 0 && at < latencyLevels && a.seen[at] > 0 {
				n := min(a.seen[at], latencySamples)
				sorted := a.samples[at]
				slices.Sort(sorted[:n])
				return sorted[n/2]
			}
		}
	}
	return 0
}
