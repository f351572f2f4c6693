// SPDX-License-Identifier: Apache-2.0

package infer

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
)

// world simulates clients, balancers with the data path's counters, and servers. Flows arrive in a
// Poisson process. A client's second packet comes a round trip after its SYN. Each server serves
// the requests of its flows in their order.
type world struct {
	now          float64
	schedule     schedule
	random       *rand.Rand
	rate         float64        // flows per second
	flood        float64        // SYNs of a flood per second
	work         func() float64 // of a flow, in seconds
	rtt          float64
	give         float64 // time in seconds until a client gives up
	talk         float64 // time in seconds between packets of a client that waits, or 0 for none
	sites        []*site
	gates        []*gate
	placed       []int   // by server, since the last reset
	skip         float64 // share of the samples that are missing
	stays, ended float64 // of the flows that have ended
}

// site is a server.
type site struct {
	cpus  int
	speed float64
	fault fault
	down  bool // gets no flows
	busy  int
	queue []*flow
}

// fault is what is wrong with a server.
type fault string

const (
	healthy   fault = ""
	refuses   fault = "refuses"
	blackhole fault = "loses SYNs"
	resets    fault = "resets after accepting"
	mute      fault = "accepts and says nothing"
)

// gate is a balancer.
type gate struct {
	estimator *Estimator
	counters  []Counters
	trials    []uint32
	samples   [][]float64 // durations, by server
	last      []float64   // time of the last sample, by server
}

type flow struct {
	gate   *gate
	server int
	work   float64
	begun  float64 // time of the second packet
	packet float64 // time of the last packet
	state  State
}

const silence = 10 // seconds after which the data path takes a flow for silent

func newWorld(seed uint64, kind Kind, balancers int, sites []*site) *world {
	w := &world{random: rand.New(rand.NewPCG(seed, 1)), rtt: 0.01, give: 30, sites: sites, placed: make([]int, len(sites))}
	var names []string
	for b := range balancers {
		names = append(names, fmt.Sprintf("b%d", b))
	}
	for b := range balancers {
		e, err := NewEstimator(Settings{Kind: kind, SlowStart: DefaultSlowStart})
		if err == nil {
			err = e.Arrange(w.members(), names, names[b])
		}
		if err != nil {
			panic(err)
		}
		n := len(sites)
		w.gates = append(w.gates, &gate{
			e, make([]Counters, n), make([]uint32, n), make([][]float64, n), make([]float64, n),
		})
	}
	w.work = func() float64 { return 0.1 * w.random.ExpFloat64() }
	w.after(0, w.sample)
	w.after(0.5, w.step)
	return w
}

func (w *world) members() []WeightedServer {
	list := members(len(w.sites))
	for i, s := range w.sites {
		list[i].Weight = float64(s.cpus)
	}
	return list
}

// load sets the rate of flows.
func (w *world) load(share, mean float64) {
	capacity := 0.0
	for _, s := range w.sites {
		capacity += float64(s.cpus) * s.speed
	}
	if w.rate == 0 {
		w.after(0, w.arrive)
	}
	w.rate = share * capacity / mean
}

// run runs for some seconds, and returns the share of flows that each server got.
func (w *world) run(seconds float64) []float64 {
	clear(w.placed)
	w.stays, w.ended = 0, 0
	for end := w.now + seconds; len(w.schedule) > 0 && w.schedule[0].at <= end; {
		e := heap.Pop(&w.schedule).(event)
		w.now = e.at
		e.do()
	}
	total, shares := 0, make([]float64, len(w.sites))
	for _, n := range w.placed {
		total += n
	}
	for i, n := range w.placed {
		shares[i] = float64(n) / float64(max(1, total))
	}
	return shares
}

func (w *world) sample() {
	for _, g := range w.gates {
		for s := range w.sites {
			if w.random.Float64() < w.skip {
				continue
			}
			g.estimator.Sample(s, g.counters[s], w.now-g.last[s])
			g.last[s] = w.now
		}
	}
	w.after(0.01+0.01*w.random.Float64(), w.sample)
}

func (w *world) step() {
	for _, g := range w.gates {
		if g.estimator.Timing() != TimingNone {
			for s := range w.sites {
				g.estimator.Observe(s, g.samples[s])
			}
		}
		g.estimator.Step(0.5, w.random.Uint64())
		for s := range w.sites {
			g.trials[s] = max(g.trials[s], g.estimator.Trials(s))
		}
	}
	w.after(0.5, w.step)
}

func (w *world) arrive() {
	w.after(w.random.ExpFloat64()/w.rate, w.arrive)
	g := w.gates[w.random.IntN(len(w.gates))]
	f := w.place(g)
	f.work = w.work()
	w.placed[f.server]++
	switch w.sites[f.server].fault {
	case refuses:
	case blackhole:
		for _, at := range []float64{1, 3, 7} {
			w.after(at, func() { w.syn(f) })
		}
	default:
		w.after(w.rtt, func() { w.answered(f) })
	}
}

// place places the flow of a SYN.
func (w *world) place(g *gate) *flow {
	best, least := 0, uint64(math.MaxUint64)
	for s := range w.sites {
		c := &g.counters[s]
		score := g.estimator.Price(s).Score(c.Established, c.New, uint16(s))
		if g.trials[s] > 0 {
			score = uint64(s)
		}
		if !w.sites[s].down && score < least {
			best, least = s, score
		}
	}
	g.trials[best] -= min(1, g.trials[best])
	g.counters[best].New++
	g.counters[best].Placed++
	f := &flow{gate: g, server: best, state: Syn}
	w.packet(f)
	return f
}

// attack sends a SYN of a flood, and the others that follow.
func (w *world) attack() {
	if w.flood > 0 {
		w.place(w.gates[w.random.IntN(len(w.gates))])
		w.after(w.random.ExpFloat64()/w.flood, w.attack)
	}
}

// syn is a repeated SYN.
func (w *world) syn(f *flow) {
	if f.state == Syn && w.sites[f.server].fault != blackhole {
		w.after(w.rtt, func() { w.answered(f) })
	}
	w.packet(f)
}

// packet keeps the flow from being silent.
func (w *world) packet(f *flow) {
	f.packet = w.now
	w.after(silence, func() {
		if f.packet+silence <= w.now+1e-9 {
			w.leave(f)
		}
	})
}

// leave removes a flow from the data path's counters.
func (w *world) leave(f *flow) {
	switch c := &f.gate.counters[f.server]; f.state {
	case Syn:
		c.New--
	case Conn:
		c.Established--
	}
	f.state = Null
}

func (w *world) answered(f *flow) {
	if f.state != Syn {
		return
	}
	c := &f.gate.counters[f.server]
	c.New--
	c.Established++
	c.Answered++
	f.state, f.begun = Conn, w.now
	w.packet(f)
	s := w.sites[f.server]
	switch s.fault {
	case mute:
		w.after(w.give, func() { w.end(f) })
	case healthy:
		s.queue = append(s.queue, f)
		w.serve(s)
		if w.talk > 0 {
			w.after(w.talk, func() { w.speak(f) })
		}
	}
}

// speak sends a packet from time to time until the flow ends.
func (w *world) speak(f *flow) {
	if f.state == Conn {
		w.packet(f)
		w.after(w.talk, func() { w.speak(f) })
	}
}

func (w *world) serve(s *site) {
	for s.busy < s.cpus && len(s.queue) > 0 {
		f := s.queue[0]
		s.queue = s.queue[1:]
		s.busy++
		w.after(f.work/s.speed, func() {
			s.busy--
			w.end(f)
			w.serve(s)
		})
	}
}

// end is a FIN.
func (w *world) end(f *flow) {
	if f.state != Conn {
		return
	}
	w.stays, w.ended = w.stays+w.now-f.begun, w.ended+1
	c := &f.gate.counters[f.server]
	c.Ended[min(c.Established, MostServed)-1]++
	kept := &f.gate.samples[f.server]
	if len(*kept) < ReservoirSize {
		*kept = append(*kept, w.now-f.begun)
	} else {
		(*kept)[w.random.IntN(ReservoirSize)] = w.now - f.begun
	}
	w.leave(f)
}

type event struct {
	at float64
	do func()
}

type schedule []event

func (w *world) after(seconds float64, do func()) { heap.Push(&w.schedule, event{w.now + seconds, do}) }

func (e schedule) Len() int           { return len(e) }
func (e schedule) Less(i, j int) bool { return e[i].at < e[j].at }
func (e schedule) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *schedule) Push(x any)        { *e = append(*e, x.(event)) }
func (e *schedule) Pop() any {
	old := *e
	last := old[len(old)-1]
	*e = old[:len(old)-1]
	return last
}

// sites returns servers with a number of processors.
func sites(n, cpus int) (list []*site) {
	for range n {
		list = append(list, &site{cpus: cpus, speed: 1})
	}
	return list
}
