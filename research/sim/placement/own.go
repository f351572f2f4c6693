// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"math"

	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/research/sim"
)

// Own has the parameters of placements that score servers by the balancer's own flows.
type Own struct {
	// Choices, if not 0, is the number of random servers that the placement compares, up to 8. 2
	// is the power of two choices.
	Choices int `yaml:"choices"`
	// Candidates, if not 0, restricts the choice to that number of candidates of the flow's
	// bucket, so that another balancer can find the flow.
	Candidates int `yaml:"candidates"`
	// Buckets is the number of buckets of the table if Candidates is not 0. 0 stands for
	// tables.DefaultBuckets.
	Buckets int `yaml:"buckets"`
	// Count tells from which event on a flow is counted.
	Count Count `yaml:"count"`
	// Ties tells which of several servers with the same score gets a flow.
	Ties Ties `yaml:"ties"`
}

// Count tells from which event on a flow is counted.
type Count string

// A flow is counted from the client's first acknowledgement (connected, the default), or from its
// SYN, when its server is chosen (placed). HLB counts established flows for all placements that it
// compares (sections I-B and VI-D2), so that a flood of SYNs is not counted (section IV-A2).
const (
	CountConnected Count = "connected"
	CountPlaced    Count = "placed"
)

func (c Count) validate() error { return oneOf("count", c, "", CountPlaced, CountConnected) }

// Ties tells which of several servers with the same score gets a flow.
type Ties string

// The server is chosen at random (the default), or it is the first in an order: that of the
// configuration, a random order of the balancer's own, or that of infer.Order, which begins with
// the balancer's home servers.
const (
	TiesRandom Ties = "random"
	TiesFirst  Ties = "first"
	TiesOwn    Ties = "own-order"
	TiesHome   Ties = "home"
)

// validate returns all parameters that are out of range or exclude each other.
func (o *Own) validate() error {
	if o.Choices > 0 && o.Candidates > 0 {
		return fmt.Errorf("choices and candidates: only one of them can be set")
	}
	return errors.Join(
		inRange("choices", o.Choices, 0, sim.MaxChain),
		checkCandidates(o.Candidates, 0), checkBuckets(o.Buckets),
		o.Count.validate(),
		oneOf("ties", o.Ties, "", TiesRandom, TiesFirst, TiesOwn, TiesHome),
	)
}

// random tells whether ties are broken at random.
func (o *Own) random() bool { return o.Ties == "" || o.Ties == TiesRandom }

// tally counts the balancer's own flows on each server.
type tally struct {
	early  bool // flows count from their SYN
	change func(server int32, by float64)
}

func newTally(c Count, change func(int32, float64)) tally {
	return tally{c == CountPlaced, change}
}

// stateBits is the number of bits of a flow's mark that contain its state. The other bits contain
// its server.
const stateBits = 2

// mark stores a flow's state and server in the flow's mark.
func mark(f *sim.Flow, state infer.State, server int32) {
	f.Mark = uint32(state) | uint32(server)<<stateBits
}

// marked returns the state and the server in the mark. For a flow that came from another balancer,
// it returns the flow's present server.
func marked(f *sim.Flow) (state infer.State, server int32) {
	state = infer.State(f.Mark & (1<<stateBits - 1))
	if state == infer.Null {
		return state, f.Server
	}
	return state, int32(f.Mark >> stateBits)
}

// placed notes that a flow was offered to a server.
func (t *tally) placed(f *sim.Flow, server int32) {
	state, _ := infer.Null.Next(infer.Open)
	mark(f, state, server)
	if t.early {
		t.change(server, 1)
	}
}

// connected notes the first acknowledgement of a flow, and counts the flow, unless flows count from
// their SYN (early). A flow that came from another balancer is first treated as placed.
func (t *tally) connected(f *sim.Flow) {
	state, server := marked(f)
	if state == infer.Null {
		t.placed(f, server)
		state, _ = marked(f)
	}
	state, occupancy := state.Next(infer.Data) // occupancy is the change of the established flows
	mark(f, state, server)
	if !t.early && occupancy != 0 {
		t.change(server, float64(occupancy))
	}
}

// closed stops counting a flow. It returns the server on which the flow was counted, and whether
// the flow was connected.
func (t *tally) closed(f *sim.Flow) (server int32, wasConnected bool) {
	state, server := marked(f)
	_, occupancy := state.Next(infer.End)
	switch {
	case t.early && state != infer.Null:
		t.change(server, -1)
	case !t.early && occupancy != 0:
		t.change(server, float64(occupancy))
	}
	return server, state == infer.Conn
}

// byScore takes the server with the smallest infer.Delay. The ranking knows servers by their
// positions in the order for ties.
type byScore struct {
	tally
	b        *sim.Balancer
	own      *Own
	weight   []float64      // by server, live or not
	flows    []float64      // by server: the flows of this balancer
	live     []bool         // by server
	ranking  *infer.Ranking // by position
	position []int32        // of each server, in the order for ties
	server   []int32        // of each position
	table    bucketTable
	row      [sim.MaxChain]uint16
	drawn    [sim.MaxChain]int32
}

// mostServers is the maximum number of servers, because positions in a row have 16 bits.
const mostServers = math.MaxUint16 + 1

// newByScore returns a placement with the given weights.
func newByScore(b *sim.Balancer, own *Own, tables *tableCache, weight []float64) (*byScore, error) {
	n := len(b.Servers)
	if n > mostServers {
		return nil, fmt.Errorf("%d servers: at most %d", n, mostServers)
	}
	p := &byScore{b: b, own: own, weight: weight, flows: make([]float64, n), live: make([]bool, n)}
	p.tally = newTally(own.Count, p.add)
	p.table = bucketTable{
		cache: tables, b: b, buckets: own.Buckets, candidates: own.Candidates,
	}
	return p, p.arrange()
}

// arrange computes everything that depends on the servers and balancers, after they have changed.
func (p *byScore) arrange() error {
	clear(p.live)
	for _, s := range p.b.Live {
		p.live[s] = true
	}
	p.reorder(p.order())
	return p.table.build()
}

// order returns the servers in the order for ties.
func (p *byScore) order() []int32 {
	switch {
	case p.own.Ties == TiesHome:
		order, _ := homeOrder(p.b, equalWeights(p.b))
		return order
	case p.server != nil:
		return p.server // other orders do not change
	}
	order := make([]int32, len(p.weight))
	for i := range order {
		order[i] = int32(i)
	}
	if p.own.Ties == TiesOwn {
		shuffle(p.b.Rand, order)
	}
	return order
}

// reorder ranks the servers in a new order.
func (p *byScore) reorder(order []int32) {
	p.server, p.position = order, inverse(order)
	p.ranking = infer.NewRanking(len(order))
	for s := range order {
		p.rank(int32(s))
	}
}

// rank brings a server's score up to date. A server that is not live has an infinite score.
func (p *byScore) rank(server int32) {
	score := math.Inf(1)
	if p.live[server] {
		score = infer.Delay(p.flows[server], p.weight[server])
	}
	p.ranking.Set(p.position[server], score)
}

// Score returns the score of a server, for samples of a run. The smallest score is chosen.
func (p *byScore) Score(server int32) float64 { return p.ranking.Score(p.position[server]) }

func (p *byScore) add(server int32, by float64) {
	p.flows[server] += by
	p.rank(server)
}

// Place offers the flow to the server with the best score: of all servers, or of those that choices
// returns. Without a live server among them, it makes no offer. A random number breaks ties.
// If ties are not random, the number is 0, and the first one of the best servers wins.
func (p *byScore) Place(f *sim.Flow, offer *sim.Offer) {
	random := uint64(0)
	if p.own.random() {
		random = p.b.Rand.Uint64()
	}
	var best int32
	if row := p.choices(f); row != nil {
		best, _ = p.ranking.BestOf(row, random)
	} else {
		best, _ = p.ranking.Best(random)
	}
	if best >= 0 {
		s := p.server[best]
		offer.Set(s)
		p.placed(f, s)
	}
}

// choices returns the positions of the servers to choose from: random ones, or the candidates of
// the flow's bucket. It returns nil if the placement chooses from all servers.
func (p *byScore) choices(f *sim.Flow) []uint16 {
	row := p.row[:0]
	switch {
	case p.own.Choices > 0:
		for _, s := range draw(p.b, p.drawn[:0], p.own.Choices) {
			row = append(row, uint16(p.position[s]))
		}
	case p.own.Candidates > 0:
		for _, s := range p.table.row(f) {
			row = append(row, uint16(p.position[s]))
		}
	default:
		return nil
	}
	return row
}

func (p *byScore) Connected(f *sim.Flow) { p.connected(f) }

func (p *byScore) Closed(f *sim.Flow, _ sim.End) { p.closed(f) }

func (p *byScore) MembershipChanged() { must(p.arrange()) }

// Recover returns the candidates of the bucket.
func (p *byScore) Recover(f *sim.Flow, offer *sim.Offer) {
	p.table.offerRow(f, offer)
}

// SED takes the server with the shortest expected delay, (l+1)/w. l is the number of the
// balancer's own flows on the server, and w is the known capacity of the server (HLB, section
// I-B). SED2 compares two random servers.
type SED struct {
	Own    `yaml:",inline"`
	tables tableCache
}

// New implements sim.Method.
func (m *SED) New(b *sim.Balancer) (sim.Placement, error) {
	return newByScore(b, &m.Own, &m.tables, capacities(b))
}

// Build implements Spec.
func (m *SED) Build() (sim.Method, sim.Policy, error) { return m, nil, m.validate() }
