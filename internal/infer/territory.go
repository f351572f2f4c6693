// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// Territory chooses servers on one of several balancers that do not communicate
// (docs/research/placement.md). Every server has a home balancer. A balancer assumes that its home
// servers have no flows of other balancers. For other servers it adds the flows that were seen to
// wait there (SetWait). While nothing was seen, it assumes symmetry: such a server has as many
// flows per unit of capacity as the home servers, up to mostOthers. The order of choice is: the
// least waiting, then home servers before others, then the shortest delay, then the order of
// preference.
type Territory struct {
	flows    []float64
	capacity []float64
	wait     []float64 // nil until SetWait is called
	position []int32   // position of each server in the order of preference
	order    []int32   // server of each position
	homes    int32     // number of home servers, which are first in order
	home     *Ranking
	away     *Ranking
	// Sums over the home servers: of flows and of capacities.
	carried, room float64
}

// NewTerritory begins without flows. A capacity is the number of flows that a server serves at
// once without letting any wait. It may be a fraction. A server with capacity 0 is not chosen. The
// order of preference contains each server once, and begins with the given number of home servers.
func NewTerritory(capacity []float64, order []int32, homes int) *Territory {
	t := &Territory{
		flows: make([]float64, len(capacity)), capacity: make([]float64, len(capacity)),
		position: make([]int32, len(capacity)), order: order, homes: int32(homes),
		home: NewRanking(homes), away: NewRanking(len(capacity) - homes),
	}
	for at, s := range order {
		t.position[s] = int32(at)
		t.SetCapacity(s, capacity[s])
	}
	return t
}

// SetCapacity changes the assumed capacity of a server.
func (t *Territory) SetCapacity(server int32, capacity float64) {
	if t.isHome(server) {
		t.room += capacity - t.capacity[server]
	}
	t.capacity[server] = capacity
	t.rank(server)
}

// SetWait sets the mean time that flows of this balancer wait on a server, for each second of
// service.
func (t *Territory) SetWait(server int32, wait float64) {
	if t.wait == nil {
		t.wait = make([]float64, len(t.flows))
	}
	t.wait[server] = wait
	t.rank(server)
}

// Add adds to the number of this balancer's flows on a server, or subtracts from it.
func (t *Territory) Add(server int32, flows float64) {
	t.flows[server] += flows
	if t.isHome(server) {
		t.carried += flows
	}
	t.rank(server)
}

// Flows returns the number of this balancer's flows on a server.
func (t *Territory) Flows(server int32) float64 { return t.flows[server] }

func (t *Territory) isHome(server int32) bool { return t.position[server] < t.homes }

// rank scores a server by its delay. For a server away from home it adds the waiting flows
// (waitOf), but not the flows that the server is assumed to have by symmetry.
func (t *Territory) rank(server int32) {
	score := math.Inf(1)
	if t.capacity[server] > 0 {
		score = Delay(t.flows[server], t.capacity[server])
	}
	if at := t.position[server]; at < t.homes {
		t.home.Set(at, score)
	} else {
		t.away.Set(at-t.homes, score+t.waitOf(server))
	}
}

// mostOthers bounds the flows that servers of other balancers are assumed to have. The bound is
// below the capacity of a server. Otherwise a balancer with more than its share of the traffic
// would conclude from its own servers that all servers are full, and keep all flows at home.
// Values from 0.5 to 0.9 make no difference.
const mostOthers = 0.9

// others returns the flows that servers of other balancers are assumed to have, per unit of
// capacity. Once SetWait was called, it returns 0.
func (t *Territory) others() float64 {
	if t.room <= 0 || t.wait != nil {
		return 0
	}
	return min(t.carried/t.room, mostOthers)
}

// waitOf returns the waiting flows of a server that is not a home server, from SetWait.
func (t *Territory) waitOf(server int32) float64 {
	if t.wait == nil {
		return 0
	}
	return t.wait[server]
}

// Best returns the server for a new flow, or -1 if there is none. It returns the best home server,
// unless the best other server would have fewer waiting flows. The assumption of symmetry adds the
// same number to the delays of all servers of other balancers. So it suffices to compare these two.
func (t *Territory) Best() int32 {
	near, nearDelay := t.home.Best(0)
	far, farDelay := t.away.Best(0)
	switch {
	case near < 0 && far < 0:
		return -1
	case far < 0, near >= 0 && waiting(nearDelay) <= waiting(farDelay+t.others()):
		return t.order[near]
	}
	return t.order[far+t.homes]
}

// BestOf returns the server for a new flow among some candidates, for example those of a bucket, or
// -1 if there is none. The order of choice is that of Territory.
func (t *Territory) BestOf(candidates []uint16) int32 {
	best, bestScore, others := int32(-1), score{}, t.others()
	for _, c := range candidates {
		s := int32(c)
		if t.capacity[s] <= 0 {
			continue
		}
		mine := score{delay: Delay(t.flows[s], t.capacity[s]), home: t.isHome(s), position: t.position[s]}
		if !mine.home {
			mine.delay += others + t.waitOf(s)
		}
		if best < 0 || mine.before(bestScore) {
			best, bestScore = s, mine
		}
	}
	return best
}

// waiting returns the number of flows that wait per unit of capacity after the arrival of a flow
// with this delay.
func waiting(delay float64) float64 { return max(0, delay-1) }

type score struct {
	delay    float64
	home     bool
	position int32
}

// before tells whether a server with this score is chosen before another one: first if fewer flows
// wait there, then if this balancer is its home, then by the shorter delay, then by the position.
func (s score) before(other score) bool {
	switch w, o := waiting(s.delay), waiting(other.delay); {
	case w != o:
		return w < o
	case s.home != other.home:
		return s.home
	case s.delay != other.delay:
		return s.delay < other.delay
	}
	return s.position < other.position
}
