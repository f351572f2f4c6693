// SPDX-License-Identifier: Apache-2.0

package infer

import "math"

// Territory chooses servers on one of several balancers that do not talk (docs/placement.md). Every server
// has a home balancer. A balancer takes its own flows for all that its home servers have. To those of
// others it adds what flows were seen to wait there (SetWait), or as long as nobody says, by symmetry,
// what its home servers carry for each unit of capacity, up to mostOthers. Least waits first, then home
// before others, then the shortest delay, then the order of preference.
type Territory struct {
	flows    []float64
	capacity []float64
	wait     []float64 // nil as long as nobody says
	position []int32   // of a server in the order of preference
	order    []int32   // the server of a position
	homes    int32     // how many of the order are at home
	home     *Ranking
	away     *Ranking
	// Of the home servers together.
	carried, room float64
}

// NewTerritory begins without flows. Capacities are how many flows a server serves at once without
// making any wait, in any fraction; 0 is a server that is not to be chosen. Of the order of
// preference, which holds each server once, the first so many are at home.
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

// SetCapacity changes what a server is taken to be able to do.
func (t *Territory) SetCapacity(server int32, capacity float64) {
	if t.isHome(server) {
		t.room += capacity - t.capacity[server]
	}
	t.capacity[server] = capacity
	t.rank(server)
}

// SetWait says how long flows of this balancer's wait on a server, in the mean, for each second of service.
func (t *Territory) SetWait(server int32, wait float64) {
	if t.wait == nil {
		t.wait = make([]float64, len(t.flows))
	}
	t.wait[server] = wait
	t.rank(server)
}

// Add counts flows of this balancer's own in, or out.
func (t *Territory) Add(server int32, flows float64) {
	t.flows[server] += flows
	if t.isHome(server) {
		t.carried += flows
	}
	t.rank(server)
}

// Flows are this balancer's own at a server.
func (t *Territory) Flows(server int32) float64 { return t.flows[server] }

func (t *Territory) isHome(server int32) bool { return t.position[server] < t.homes }

// rank scores a server by its delay, without what others are taken to have by symmetry.
func (t *Territory) rank(server int32) {
	score := math.Inf(1)
	if t.capacity[server] > 0 {
		score = Delay(t.flows[server], t.capacity[server])
	}
	if at := t.position[server]; at < t.homes {
		t.home.Set(at, score)
	} else {
		t.away.Set(at-t.homes, score+t.seen(server))
	}
}

// mostOthers bounds what others are taken to have: less than fills a server. A balancer with more than
// its share of the traffic would else conclude from its own servers that all are as full, and keep
// everything at home. From 0.5 to 0.9 it makes no difference.
const mostOthers = 0.9

// others is what other balancers are taken to have at servers that are not at home, for each unit of
// capacity, if nobody says what it is.
func (t *Territory) others() float64 {
	if t.room <= 0 || t.wait != nil {
		return 0
	}
	return min(t.carried/t.room, mostOthers)
}

// seen is what was said of a server that is not at home.
func (t *Territory) seen(server int32) float64 {
	if t.wait == nil {
		return 0
	}
	return t.wait[server]
}

// Best returns the server for a new flow, -1 if there is none. What others have by symmetry adds the
// same to every delay abroad, so the best of home and the best of abroad are all that has to be compared.
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

// BestOf is Best among some candidates: a bucket's, for example.
func (t *Territory) BestOf(candidates []uint16) int32 {
	best, bestScore, others := int32(-1), score{}, t.others()
	for _, c := range candidates {
		s := int32(c)
		if t.capacity[s] <= 0 {
			continue
		}
		mine := score{delay: Delay(t.flows[s], t.capacity[s]), home: t.isHome(s), position: t.position[s]}
		if !mine.home {
			mine.delay += others + t.seen(s)
		}
		if best < 0 || mine.before(bestScore) {
			best, bestScore = s, mine
		}
	}
	return best
}

// waiting is how many flows have to wait for each unit of capacity, when the one with this delay has
// come.
func waiting(delay float64) float64 { return max(0, delay-1) }

type score struct {
	delay    float64
	home     bool
	position int32
}

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
