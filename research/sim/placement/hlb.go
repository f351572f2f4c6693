// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/research/sim"
)

// HLB takes the server with the smallest (l+1)/w. l is the number of the balancer's own flows on
// the server. w is inferred from the durations of flows: "HLB: Toward Load-Aware Load
// Balancing", section IV. HLB2 compares two random servers. HLB-FIX has a constant measurement
// noise (section VI-D1).
type HLB struct {
	Own     `yaml:",inline"`
	Weights `yaml:",inline"`
	tables  tableCache
}

// Weights are the parameters of infer.Speeds.
type Weights struct {
	// Interval is the time from one step to the next, 1 ms to 1 h.
	Interval time.Duration `yaml:"interval"`
	// Norm is "sum", the paper's norm and the default, or "mean".
	Norm string `yaml:"norm"`
	// Sampling tells which durations the weights come from: "flow-ends", the default, or
	// "as-printed", which is exactly HLB's algorithm 1 (infer.Algorithm1).
	Sampling Sampling `yaml:"sampling"`
	// Unseen tells how a server counts before one of its flows has ended: "average", the default,
	// or "zero". With "as-printed" it must not be set, because algorithm 1 itself determines it.
	Unseen string `yaml:"unseen"`
	// FixedNoise turns HLB into HLB-FIX.
	FixedNoise bool `yaml:"fixed-noise"`
	// Steps, if not 0, rounds weights to multiples of 1/Steps. A data path without floating-point
	// numbers may have such weights: 65536 for 16 bits.
	Steps int `yaml:"steps"`
}

// Sampling tells which durations HLB's weights come from.
type Sampling string

// The samplings: infer.FlowEnds and infer.AsPrinted.
const (
	SamplingFlowEnds  Sampling = "flow-ends"
	SamplingAsPrinted Sampling = "as-printed"
)

// round rounds a weight as the data path stores it.
func (w *Weights) round(weight float64) float64 {
	if w.Steps == 0 {
		return weight
	}
	return max(1, math.Round(weight*float64(w.Steps))) / float64(w.Steps)
}

// validate returns all parameters that are out of range or exclude each other.
func (w *Weights) validate() error {
	var unseen error
	if w.Sampling == SamplingAsPrinted && w.Unseen != "" {
		unseen = fmt.Errorf("unseen %q: not with sampling %s, which begins with zeros", w.Unseen,
			w.Sampling)
	}
	return errors.Join(
		checkInterval(w.Interval), unseen,
		oneOf("sampling", w.Sampling, "", SamplingFlowEnds, SamplingAsPrinted),
		oneOf("norm", w.Norm, "", "sum", "mean"),
		oneOf("unseen", w.Unseen, "", "average", "zero"),
		inRange("steps", w.Steps, 0, math.MaxInt32),
	)
}

// speeds returns the estimator of HLB with these parameters.
func (w *Weights) speeds(servers int) *infer.Speeds {
	o := infer.Options{FixedNoise: w.FixedNoise}
	if w.Norm == "mean" {
		o.Norm = infer.ByMean
	}
	if w.Unseen == "zero" {
		o.Unseen = infer.AsZero
	}
	if w.Sampling == SamplingAsPrinted {
		o.Sampling = infer.AsPrinted
	}
	return infer.NewSpeeds(servers, o)
}

// New implements sim.Method. With the sampling as-printed, durations come from algorithm 1.
func (m *HLB) New(b *sim.Balancer) (sim.Placement, error) {
	p, err := newHLB(b, &m.Own, &m.Weights, &m.tables)
	if err != nil {
		return nil, err
	}
	p.weigh()
	if m.Sampling == SamplingAsPrinted {
		return &printedHLB{p, newAlgorithm1(b), p.register}, nil
	}
	return p, nil
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

// Weight returns a server's weight from the last step, for samples of a run.
func (p *hlb) Weight(server int32) float64 { return p.speeds.Weight(server) }

// Gain returns a server's Kalman gain in the last step, for samples of a run.
func (p *hlb) Gain(server int32) float64 { return p.speeds.Gain(server) }

func (p *hlb) Interval() float64 { return p.weights.Interval.Seconds() }

func (p *hlb) Step() {
	p.speeds.Step()
	p.weigh()
}

// weigh takes the weights of the last step for all servers, also for those that are absent now and
// may be added later.
func (p *hlb) weigh() {
	for s := range p.weight {
		p.weight[s] = p.weights.round(p.speeds.Weight(int32(s)))
		p.rank(int32(s))
	}
}

// MembershipChanged forgets what is known about servers that become live.
func (p *hlb) MembershipChanged() {
	was := slices.Clone(p.live)
	p.byScore.MembershipChanged()
	for s, is := range p.live {
		if is && !was[s] {
			p.speeds.Forget(int32(s))
		}
	}
}

// Closed registers the duration of a flow that was connected.
func (p *hlb) Closed(f *sim.Flow, end sim.End) {
	if server, wasConnected := p.closed(f); wasConnected {
		p.register(server, end.Duration)
	}
}

// register records the duration of a flow on a server.
func (p *hlb) register(server int32, duration float64) {
	p.speeds.Observe(server, duration, p.b.Rand.Uint64())
}

// printedHLB gets durations by algorithm 1.
type printedHLB struct {
	*hlb
	flows algorithm1
	// register is hlb.register, unless a test replaces it.
	register func(server int32, duration float64)
}

// Place gives the SYN to algorithm 1, if there is a server for the flow.
func (p *printedHLB) Place(f *sim.Flow, offer *sim.Offer) {
	p.hlb.Place(f, offer)
	if offer.N > 0 {
		p.flows.opened(f)
	}
}

// Connected gives packets to algorithm 1.
func (p *printedHLB) Connected(f *sim.Flow) {
	p.hlb.Connected(f)
	p.flows.connected(f, p.register)
}

// Closed gives the last packets of a connected flow to algorithm 1.
func (p *printedHLB) Closed(f *sim.Flow, _ sim.End) {
	if _, wasConnected := p.closed(f); wasConnected {
		p.flows.ended(f, p.register)
	}
	p.flows.forget(f)
}

// algorithm1 runs algorithm 1 of HLB for the flows of a balancer. The algorithm works on packets,
// and the simulator on flows. So a client sends the packets of a short HTTP request: a SYN, an
// acknowledgement with the request right behind it, an acknowledgement of the response, and a FIN.
type algorithm1 struct {
	b     *sim.Balancer
	flows map[uint64]*infer.Algorithm1 // by Flow.Number
}

func newAlgorithm1(b *sim.Balancer) algorithm1 {
	return algorithm1{b, make(map[uint64]*infer.Algorithm1)}
}

// opened handles the SYN.
func (a algorithm1) opened(f *sim.Flow) {
	a.flows[f.Number] = &infer.Algorithm1{}
	a.flows[f.Number].Packet(infer.Open, a.b.Now())
}

// connected handles two packets: the first acknowledgement, and the request behind it.
func (a algorithm1) connected(f *sim.Flow, register func(server int32, duration float64)) {
	a.packets(f, register, infer.Data, infer.Data)
}

// ended handles the last two packets: the acknowledgement of the response, and the FIN.
func (a algorithm1) ended(f *sim.Flow, register func(server int32, duration float64)) {
	a.packets(f, register, infer.Data, infer.End)
}

// forget removes a flow.
func (a algorithm1) forget(f *sim.Flow) { delete(a.flows, f.Number) }

// packets handles packets that the balancer gets now. Flows that came from another balancer are not
// in the tables of this one.
func (a algorithm1) packets(
	f *sim.Flow, register func(server int32, duration float64), kinds ...infer.Packet,
) {
	flow, ok := a.flows[f.Number]
	if !ok {
		return
	}
	for _, kind := range kinds {
		if duration, registered := flow.Packet(kind, a.b.Now()); registered {
			_, server := marked(f)
			register(server, duration)
		}
	}
}
