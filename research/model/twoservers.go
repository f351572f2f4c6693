// SPDX-License-Identifier: Apache-2.0

package model

import (
	"context"
	"fmt"
	"math"

	"gonum.org/v1/gonum/floats"
)

// Rule is a rule by which the balancer of two servers chooses one (HLB, table II).
type Rule int

const (
	// ECMP sends every second flow to each server.
	ECMP Rule = iota
	// WCMP sends flows in proportion to the weights.
	WCMP
	// LSQ sends a flow to the server with fewer flows, counting the flows that the balancer knows.
	LSQ
	// SED sends a flow to the server with the smaller (l+1)/w, where l is the number of flows that
	// the balancer knows, and w is the weight.
	SED
)

// Rules lists all rules in the order of HLB's figure 2.
var Rules = []Rule{ECMP, WCMP, LSQ, SED}

func (r Rule) String() string { return [...]string{"ECMP", "WCMP", "LSQ", "SED"}[r] }

// MaxRoom is the largest number of flows of a server in this model.
const MaxRoom = 32

// TwoServers is the system of section III-A of HLB. Two servers work at constant rates, which
// their flows share. A server refuses a flow when it has no room. A part of the flows, a Poisson
// process, passes the balancer. The balancer does not see the others.
type TwoServers struct {
	// Speeds are μ_1 and μ_2. Both are positive.
	Speeds [2]float64
	// Weights are the speeds that WCMP and SED assume. Both are positive, and only their ratio
	// counts.
	Weights [2]float64
	// Load is the rate of all flows divided by the speed of both servers, (λ+γ)/(μ_1+μ_2). It is
	// positive, and 1 in the paper.
	Load float64
	// Observed is the share of flows that pass the balancer, λ/(λ+γ), 0 to 1. The others arrive at
	// both servers at equal rates, and the balancer does not count them.
	Observed float64
	// Room is Q, the maximum number of flows of a server: 1 to MaxRoom. The paper does not give
	// its value.
	Room int
	// Rule says how the balancer chooses between the two servers. If it prefers neither, the
	// balancer chooses each with probability 1/2.
	Rule Rule
}

// TwoServersResult is the steady state of two servers. In results of Solve, durations and flows
// have a relative error of 1e-6, and refusals an error of 1e-9.
type TwoServersResult struct {
	// Duration is the quantity of HLB's figure 2: the mean of Σ l_i/(l_1+l_2)·l_i/μ_i over the
	// states with at least one flow.
	Duration float64
	// Flows are the mean numbers of flows at the servers.
	Flows [2]float64
	// Refused is the share of all flows whose server has no room.
	Refused float64
}

// Solve returns the steady state of the Markov chain. Its states are the numbers of flows on both
// servers, with separate numbers for the flows that the balancer knows and for the others. The
// paper's state is only (l_1, l_2). But then a balancer that sees half of the flows would know all
// of them, and LSQ would be the same as GSQ2. Which flow of a server ends next does not depend on
// whether the balancer knows it.
//
// With MaxRoom, and a part of the flows observed, there are 314,721 states, which may take a
// minute. If the context ends before, Solve returns the context's cause.
func (s TwoServers) Solve(ctx context.Context) (TwoServersResult, error) {
	if err := s.validate(); err != nil {
		return TwoServersResult{}, err
	}
	p, err := s.stationary(ctx)
	if err != nil {
		return TwoServersResult{}, err
	}
	return s.result(p), nil
}

// SolveApart returns the steady state by the equation that HLB prints in section III-A. In it the
// queues are independent: λ_i is a constant, λ·Pr{i is chosen}, that does not depend on queue i.
// This is an approximation: LSQ and SED only determine the constants λ_i. Besides, the balancer
// knows all flows, whether it observes them or not.
func (s TwoServers) SolveApart() (TwoServersResult, error) {
	if err := s.validate(); err != nil {
		return TwoServersResult{}, err
	}
	allKnown := s
	allKnown.Observed = 1 // so that the state of a server is only its number of flows
	list, _ := allKnown.occupancies()
	// share is the share of the balancer's flows that go to the first server. The queues depend on
	// it, and it depends on the queues.
	share := solve(func(share float64) float64 {
		first, second := s.queue(0, share), s.queue(1, 1-share)
		chosen := 0.0
		for i := range list {
			for j := range list {
				chosen += first[i] * second[j] * s.preference(list[i], list[j])
			}
		}
		return share - chosen
	}, 0, 1)

	first, second := s.queue(0, share), s.queue(1, 1-share)
	p := make([]float64, len(first)*len(second))
	for i := range first {
		for j := range second {
			p[i*len(second)+j] = first[i] * second[j]
		}
	}
	r := allKnown.result(p)
	toFirst := s.Observed*share + (1-s.Observed)/2 // share of all flows
	r.Refused = toFirst*first[s.Room] + (1-toFirst)*second[s.Room]
	return r, nil
}

// queue returns the distribution of the number of flows of one server, M/M/1/Q. share is the share
// of the balancer's flows that go to this server.
func (s TwoServers) queue(server int, share float64) []float64 {
	rate := s.Load * (s.Speeds[0] + s.Speeds[1]) * (s.Observed*share + (1-s.Observed)/2)
	ratio, sum := rate/s.Speeds[server], 0.0
	p := make([]float64, s.Room+1)
	for n := range p {
		p[n] = math.Pow(ratio, float64(n))
		sum += p[n]
	}
	floats.Scale(1/sum, p)
	return p
}

// validate returns an error that names the first field that is out of range.
func (s TwoServers) validate() error {
	positive := func(v float64) bool { return v > 0 && !math.IsInf(v, 1) }
	for i := range 2 {
		if !positive(s.Speeds[i]) {
			return fmt.Errorf("speed %v of server %d: must be above 0", s.Speeds[i], i+1)
		}
		if !positive(s.Weights[i]) {
			return fmt.Errorf("weight %v of server %d: must be above 0", s.Weights[i], i+1)
		}
	}
	if !positive(s.Load) {
		return fmt.Errorf("load %v: must be above 0", s.Load)
	}
	if !(s.Observed >= 0 && s.Observed <= 1) {
		return fmt.Errorf("observed share %v: must be 0 to 1", s.Observed)
	}
	if s.Room < 1 || s.Room > MaxRoom {
		return fmt.Errorf("room for %d flows: must be 1 to %d", s.Room, MaxRoom)
	}
	if s.Rule < ECMP || s.Rule > SED {
		return fmt.Errorf("rule %d: must be %d to %d", int(s.Rule), int(ECMP), int(SED))
	}
	return nil
}

// occupancy is the number of flows of one server: those that the balancer knows, and the others.
type occupancy struct{ known, unknown int }

func (o occupancy) flows() int { return o.known + o.unknown }

// preference returns the share of the balancer's flows that go to the first server (HLB, table
// II). That table prints 1/2 for ECMP, and must mean λ/2.
func (s TwoServers) preference(first, second occupancy) float64 {
	switch s.Rule {
	case WCMP:
		return s.Weights[0] / (s.Weights[0] + s.Weights[1])
	case LSQ:
		return firstShare(float64(first.known), float64(second.known))
	case SED:
		// Without divisions, so that equal values compare as equal.
		return firstShare(float64(first.known+1)*s.Weights[1], float64(second.known+1)*s.Weights[0])
	}
	return 0.5
}

// firstShare returns the share of the flows that the first server gets if all go to the server with
// the smaller value: 1 if a is smaller, 0 if b is smaller, and 1/2 if they are equal.
func firstShare(a, b float64) float64 {
	switch {
	case a < b:
		return 1
	case a > b:
		return 0
	}
	return 0.5
}

// occupancies lists all possible occupancies of a server, and the index of each in the list. If
// the balancer sees all flows, there are no unknown ones. If it sees none, there are no known ones.
func (s TwoServers) occupancies() ([]occupancy, map[occupancy]int) {
	var list []occupancy
	index := make(map[occupancy]int)
	for known := range s.Room + 1 {
		for unknown := range s.Room + 1 - known {
			if known > 0 && s.Observed == 0 || unknown > 0 && s.Observed == 1 {
				continue
			}
			index[occupancy{known, unknown}] = len(list)
			list = append(list, occupancy{known, unknown})
		}
	}
	return list, index
}

// transition is a transition into a state.
type transition struct {
	from int
	rate float64
}

// chain is a Markov chain in continuous time. It has the transitions into each state, and the rate
// at which each state is left.
type chain struct {
	in  [][]transition
	out []float64
}

// add adds a transition, unless its rate is 0.
func (c *chain) add(from, to int, rate float64) {
	if rate > 0 {
		c.in[to] = append(c.in[to], transition{from, rate})
		c.out[from] += rate
	}
}

// chain returns the Markov chain. State i·n+j is that of the i-th occupancy of the first server and
// the j-th of the second, where n is the number of occupancies.
func (s TwoServers) chain() *chain {
	list, index := s.occupancies()
	n := len(list)
	c := &chain{in: make([][]transition, n*n), out: make([]float64, n*n)}
	rate := s.Load * (s.Speeds[0] + s.Speeds[1])
	known, unknown := rate*s.Observed, rate*(1-s.Observed)
	for i, first := range list {
		for j, second := range list {
			share := s.preference(first, second)
			to := func(a, b occupancy) int { return index[a]*n + index[b] }
			for _, next := range s.moves(first, 0, known*share, unknown/2) {
				c.add(i*n+j, to(next.occupancy, second), next.rate)
			}
			for _, next := range s.moves(second, 1, known*(1-share), unknown/2) {
				c.add(i*n+j, to(first, next.occupancy), next.rate)
			}
		}
	}
	return c
}

// move is a change of a server's occupancy, with its rate.
type move struct {
	occupancy
	rate float64
}

// moves lists the changes of a server with occupancy o. known and unknown are the rates at which
// flows arrive at it.
func (s TwoServers) moves(o occupancy, server int, known, unknown float64) []move {
	var moves []move
	if o.flows() < s.Room {
		moves = append(moves,
			move{occupancy{o.known + 1, o.unknown}, known},
			move{occupancy{o.known, o.unknown + 1}, unknown})
	}
	speed := s.Speeds[server] / float64(max(1, o.flows())) // of serving one flow
	if o.known > 0 {
		moves = append(moves, move{occupancy{o.known - 1, o.unknown}, speed * float64(o.known)})
	}
	if o.unknown > 0 {
		moves = append(moves, move{occupancy{o.known, o.unknown - 1}, speed * float64(o.unknown)})
	}
	// A move of rate 0 may lead to an occupancy that is not in the list.
	kept := moves[:0]
	for _, m := range moves {
		if m.rate > 0 {
			kept = append(kept, m)
		}
	}
	return kept
}

// stationary returns the probabilities of the states in the steady state, by Gauss-Seidel sweeps
// forwards and backwards. A state's probability is the flow of probability into it, divided by the
// rate at which it is left.
func (s TwoServers) stationary(ctx context.Context) ([]float64, error) {
	c := s.chain()
	p := make([]float64, len(c.out))
	for i := range p {
		p[i] = 1 / float64(len(p))
	}
	for change := 1.0; change > 1e-9; {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		change = 0
		for i := range p {
			change += c.update(p, i)
		}
		for i := len(p) - 1; i >= 0; i-- {
			change += c.update(p, i)
		}
		floats.Scale(1/floats.Sum(p), p)
	}
	return p, nil
}

// update computes the probability of state i again, and returns the size of its change.
func (c *chain) update(p []float64, i int) (change float64) {
	if c.out[i] == 0 {
		return 0
	}
	sum := 0.0
	for _, t := range c.in[i] {
		sum += p[t.from] * t.rate
	}
	old := p[i]
	p[i] = sum / c.out[i]
	return math.Abs(p[i] - old)
}

// result computes the result from the probabilities of the states.
func (s TwoServers) result(p []float64) TwoServersResult {
	list, _ := s.occupancies()
	var r TwoServersResult
	busy := 0.0
	for i, first := range list {
		for j, second := range list {
			probability := p[i*len(list)+j]
			l := [2]float64{float64(first.flows()), float64(second.flows())}
			r.Flows[0] += probability * l[0]
			r.Flows[1] += probability * l[1]
			r.Refused += probability * s.refused(first, second)
			if total := l[0] + l[1]; total > 0 {
				busy += probability
				// Σ l_i/(l_1+l_2)·l_i/μ_i, as in HLB's figure 2
				r.Duration += probability * (l[0]*l[0]/s.Speeds[0] + l[1]*l[1]/s.Speeds[1]) / total
			}
		}
	}
	r.Duration /= busy
	return r
}

// refused returns the share of all flows that find no room in the state with these occupancies.
func (s TwoServers) refused(first, second occupancy) float64 {
	// The share of all flows that go to the first server.
	share := s.preference(first, second)*s.Observed + (1-s.Observed)/2
	refused := 0.0
	if first.flows() == s.Room {
		refused += share
	}
	if second.flows() == s.Room {
		refused += 1 - share
	}
	return refused
}
