// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/sim"
)

// Prequal is the rule of "Load is not what you should balance: Introducing Prequal" (Wydrowski,
// Kleinberg, Rumble and Archer, NSDI 2024): a pool of answers to probes that are sent with each flow,
// used several times, and chosen from by hot or cold lexicographically. What is not given there for
// servers that come and go is left out.
type Prequal struct {
	// Probes is how many random servers are asked with each flow, the paper's r_probe: above 0, also
	// less than 1.
	Probes float64 `yaml:"probes"`
	// Remove is how many answers are removed with each flow, r_remove.
	Remove float64 `yaml:"remove"`
	// Pool is how many answers are kept.
	Pool int `yaml:"pool"`
	// Age at which an answer is thrown away, 1 ms to 1 h.
	Age time.Duration `yaml:"age"`
	// Quantile of the flows in flight, of recent answers, above which a server is hot, 0 to 1: Q_RIF.
	// With 1 none is, and latencies alone decide.
	Quantile float64 `yaml:"quantile"`
	// Delta is the paper's, by which answers come into the pool a little faster than they go.
	Delta float64 `yaml:"delta"`
}

// prequalDefaults are those of the paper's experiments.
func prequalDefaults() *Prequal {
	return &Prequal{Probes: 3, Remove: 1, Pool: 16, Age: time.Second, Quantile: math.Pow(2, -0.25), Delta: 1}
}

// Build implements Spec.
func (m *Prequal) Build() (sim.Method, sim.Policy, error) {
	return m, latencyPolicy{}, errors.Join(
		inRange("probes", m.Probes, 0.001, 100), inRange("remove", m.Remove, 0, 100), inRange("pool", m.Pool, 1, 1000),
		inRange("age", m.Age, time.Millisecond, time.Hour), inRange("quantile", m.Quantile, 0, 1), inRange("delta", m.Delta, 0, 100),
	)
}

// New implements sim.Method.
func (m *Prequal) New(b *sim.Balancer) (sim.Placement, error) {
	return &prequal{m: m, b: b}, nil
}

// answer is one to a probe.
type answer struct {
	server  int32
	uses    int32 // that are left
	flight  int32 // flows
	latency float64
	when    float64
}

// recentAnswers are those that the quantile is of.
const recentAnswers = 128

type prequal struct {
	m      *Prequal
	b      *sim.Balancer
	pool   []answer // the oldest first
	recent [recentAnswers]int32
	seen   int // of recent, ever
	owed   float64
	remove float64
	worst  bool // removes the worst next, not the oldest
	sorted [recentAnswers]int32
}

func (p *prequal) Place(_ *sim.Flow, offer *sim.Offer) {
	if len(p.b.Live) == 0 {
		return
	}
	p.expire()
	// With fewer than two there is no choice, and the paper's clients fall back to chance.
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

// expire throws away what is too old.
func (p *prequal) expire() {
	p.pool = slices.DeleteFunc(p.pool, func(a answer) bool { return p.b.Now()-a.when > p.m.Age.Seconds() })
}

// use takes an answer, and counts the flow in.
func (p *prequal) use(at int) int32 {
	a := &p.pool[at]
	server := a.server
	a.flight++
	if a.uses--; a.uses <= 0 {
		p.pool = slices.Delete(p.pool, at, at+1)
	}
	return server
}

// choose returns the best answer's index, or the worst's: among cold ones the latency decides, hot ones
// come after them, by flows in flight.
func (p *prequal) choose(worst bool) int {
	hot, best := p.hot(), 0
	for i := range p.pool[1:] {
		if p.pool[i+1].before(&p.pool[best], hot) != worst {
			best = i + 1
		}
	}
	return best
}

func (a *answer) before(other *answer, hot int32) bool {
	switch aHot, otherHot := a.flight > hot, other.flight > hot; {
	case aHot != otherHot:
		return otherHot
	case aHot:
		return a.flight < other.flight
	}
	return a.latency < other.latency
}

// hot is the number of flows in flight above which a server is.
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

// removeOne takes the oldest and the worst in turn.
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

// Probed puts an answer into the pool, in the place of the oldest if it is full.
func (p *prequal) Probed(server int32, load sim.Load) {
	p.recent[p.seen%recentAnswers] = load.Open
	p.seen++
	if len(p.pool) == p.m.Pool {
		p.pool = slices.Delete(p.pool, 0, 1)
	}
	p.pool = append(p.pool, answer{server, p.reuse(), load.Open, load.Latency, p.b.Now()})
}

// reuse is how often an answer may be used, b_reuse of the paper (section 4): as often as it takes for
// the pool to stay full, in the mean, by chance the whole number above or below.
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

// MembershipChanged forgets servers that are not live.
func (p *prequal) MembershipChanged() {
	p.pool = slices.DeleteFunc(p.pool, func(a answer) bool {
		_, ok := slices.BinarySearch(p.b.Live, a.server)
		return !ok
	})
}

// latencyPolicy has servers take all, and estimate their latency for probes.
type latencyPolicy struct{}

// New implements sim.Policy.
func (latencyPolicy) New(*sim.Host) (sim.Agent, error) { return &latencyAgent{}, nil }

const (
	latencyLevels  = 64 // numbers of flows in flight that are told apart
	latencySamples = 16 // for each
)

// latencyAgent keeps the latest latencies by the number of flows that were in flight when the flow
// came, as the paper's servers do, and takes their median.
type latencyAgent struct {
	samples [latencyLevels][latencySamples]float64
	seen    [latencyLevels]int
}

// Decide takes the flow.
func (a *latencyAgent) Decide(_ sim.Load, offer *sim.Offer) int32 { return offer.At }

// Served takes in a latency.
func (a *latencyAgent) Served(duration float64, others int32) {
	level := min(others, latencyLevels-1)
	a.samples[level][a.seen[level]%latencySamples] = duration
	a.seen[level]++
}

// Latency is the median at the nearest number of flows in flight that there are samples of, 0 without
// any.
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
