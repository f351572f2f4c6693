// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/sim"
)

// HLB takes the server of the smallest (l+1)/w, with l the balancer's own flows that are connected and
// w inferred from how long flows last: "HLB: Toward Load-Aware Load Balancing", section IV. HLB2 looks
// at two random servers; HLB-FIX has a fixed measurement noise (section VI-D1).
type HLB struct {
	Own     `yaml:",inline"`
	Weights `yaml:",inline"`
	tables  tableCache
}

// Weights are the parameters of infer.Speeds.
type Weights struct {
	// Interval is the time from one step to the next, 1 ms to 1 h.
	Interval time.Duration `yaml:"interval"`
	// Norm is "sum" (the paper's, also "") or "mean".
	Norm string `yaml:"norm"`
	// Unseen is what servers are taken for of which no flow has ended: "average" (also "") or "zero".
	Unseen string `yaml:"unseen"`
	// FixedNoise makes it HLB-FIX.
	FixedNoise bool `yaml:"fixed-noise"`
	// Steps, if not 0, has weights rounded to multiples of 1/Steps, as a data path without
	// floating-point numbers may have them: 65536 for 16 bits.
	Steps int `yaml:"steps"`
}

// round is a weight as it is written.
func (w *Weights) round(weight float64) float64 {
	if w.Steps == 0 {
		return weight
	}
	return max(1, math.Round(weight*float64(w.Steps))) / float64(w.Steps)
}

func (w *Weights) validate() error {
	return errors.Join(
		checkInterval(w.Interval),
		oneOf("norm", w.Norm, "", "sum", "mean"),
		oneOf("unseen", w.Unseen, "", "average", "zero"),
		inRange("steps", w.Steps, 0, math.MaxInt32),
	)
}

func (w *Weights) speeds(servers int) *infer.Speeds {
	o := infer.Options{FixedNoise: w.FixedNoise}
	if w.Norm == "mean" {
		o.Norm = infer.ByMean
	}
	if w.Unseen == "zero" {
		o.Unseen = infer.AsZero
	}
	return infer.NewSpeeds(servers, o)
}

// New implements sim.Method.
func (m *HLB) New(b *sim.Balancer) (sim.Placement, error) {
	p, err := newHLB(b, &m.Own, &m.Weights, &m.tables)
	if err == nil {
		p.weigh()
	}
	return p, err
}

// Build implements Spec.
func (m *HLB) Build() (sim.Method, sim.Policy, error) {
	return m, nil, errors.Join(m.Own.validate(), m.Weights.validate())
}

type hlb struct {
	*byScore
	weights *Weights
	speeds  *infer.Speeds
}

func newHLB(b *sim.Balancer, own *Own, weights *Weights, tables *tableCache) (*hlb, error) {
	scored, err := newByScore(b, own, tables, equalWeights(b))
	return &hlb{byScore: scored, weights: weights, speeds: weights.speeds(len(b.Servers))}, err
}

// Weight is a server's of the last step; samples of a run may want to see it.
func (p *hlb) Weight(server int32) float64 { return p.speeds.Weight(server) }

// Gain is a server's Kalman gain of the last step; samples of a run may want to see it.
func (p *hlb) Gain(server int32) float64 { return p.speeds.Gain(server) }

func (p *hlb) Interval() float64 { return p.weights.Interval.Seconds() }

func (p *hlb) Step() {
	p.speeds.Step()
	p.weigh()
}

// weigh takes over the weights of all servers, also of those that may come later.
func (p *hlb) weigh() {
	for s := range p.weight {
		p.weight[s] = p.weights.round(p.speeds.Weight(int32(s)))
		p.rank(int32(s))
	}
}

// MembershipChanged forgets what was known of servers that come, perhaps for another time.
func (p *hlb) MembershipChanged() {
	was := slices.Clone(p.live)
	p.byScore.MembershipChanged()
	for s, is := range p.live {
		if is && !was[s] {
			p.speeds.Forget(int32(s))
		}
	}
}

func (p *hlb) Closed(f *sim.Flow, end sim.End) {
	if server, wasConnected := p.closed(f); wasConnected {
		p.speeds.Observe(server, end.Duration, p.b.Rand.Uint64())
	}
}
