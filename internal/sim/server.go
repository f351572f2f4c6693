// SPDX-License-Identifier: Apache-2.0

package sim

import "math"

// server is a server's state. Its stations are those of the same index (CPU) and, if there are jobs
// with IO, len(servers) after it. It fills one line of the cache.
type server struct {
	alive   bool
	live    bool  // as balancers know: one of engine.live
	workers int32 // 0 for no limit
	backlog int32 // -1 for no limit
	open    int32
	active  int32    // with processor sharing: workers at work
	waiting flowList // with processor sharing: for a worker
	use     use
}

// agent is what decides on a server. What it wants to know is found out once.
type agent struct {
	Agent
	observer  Observer
	estimator Estimator
}

// agentOf returns nil for servers that take what they are offered.
func (e *engine) agentOf(s int32) *agent {
	if e.agents == nil {
		return nil
	}
	return &e.agents[s]
}

// station is a queue of a server.
type station struct {
	server  int32
	cpus    int32
	slot    int32 // the first of as many as there are processors, or the only one if they are shared
	busy    int32 // flows in service
	speed   float64
	each    float64 // 1/cpus
	waiting flowList
	sharing *sharing // nil if the discipline is FIFO
}

// slot is where services end: a processor, or a shared station.
type slot struct {
	station int32
	flow    int32 // in service; none if the station is shared
}

var never = math.Inf(1)

// enter has a flow begin a stage at a station.
func (e *engine) enter(s int32, f int32) {
	st := &e.stations[s]
	switch {
	case st.sharing != nil:
		e.join(st, f)
	case st.busy < st.cpus:
		st.busy++
		slot := st.slot
		for e.slots[slot].flow != none {
			slot++
		}
		e.serve(st, slot, f)
	default:
		e.append(&st.waiting, f)
	}
}

// serve gives a processor to a flow.
func (e *engine) serve(st *station, slot, f int32) {
	e.slots[slot].flow = f
	flow := &e.flows[f]
	e.services.Set(slot, e.now+e.work(&flow.Flow, flow.stage)/st.speed)
}

// serviceEnds takes the flow out of a slot whose service is over, and gives the slot to the next.
func (e *engine) serviceEnds(slot int32) {
	st := &e.stations[e.slots[slot].station]
	var f int32
	e.touch(st.server)
	if st.sharing != nil {
		f = e.unshare(st)
	} else {
		f = e.slots[slot].flow
		e.nextInLine(st, slot)
	}
	e.hold(f)
	e.stageEnds(f)
	e.release(f)
}

// nextInLine gives a free processor to the flow that waits longest and whose client still does.
func (e *engine) nextInLine(st *station, slot int32) {
	for st.waiting.n > 0 {
		f := e.takeFirst(&st.waiting)
		if !e.gaveUp(f) {
			e.serve(st, slot, f)
			return
		}
		e.abandon(f)
	}
	st.busy--
	e.slots[slot].flow = none
	e.services.Set(slot, never)
}

// gaveUp tells whether a flow's client does not wait any more.
func (e *engine) gaveUp(f int32) bool {
	return e.config.Timeout > 0 && e.now-e.flows[f].sent >= e.config.Timeout
}

// stageEnds has a flow enter its next stage, or leave.
func (e *engine) stageEnds(f int32) {
	flow := &e.flows[f]
	flow.stage++
	stages := e.config.Jobs[flow.Class].Stages
	if int(flow.stage) < len(stages) {
		e.begin(f, &stages[flow.stage])
		return
	}
	s := flow.Server
	e.leave(f, Completed)
	if e.stations[s].sharing != nil {
		e.nextWorker(s)
	}
}

// begin has a flow begin a stage.
func (e *engine) begin(f int32, stage *Stage) {
	station := e.flows[f].Server
	if stage.Queue == IO {
		station += int32(len(e.servers))
	}
	e.enter(station, f)
}

// work is how many seconds of work a stage of a flow has.
func (e *engine) work(f *Flow, stage uint8) float64 {
	s := &e.config.Jobs[f.Class].Stages[stage]
	work := s.Work.sample(stageDraw(f.Key, stage))
	if s.PerUnit > 0 {
		work += s.PerUnit * e.sizes[f.Number]
	}
	return work
}

// nextWorker gives the worker that a flow has left to one that waits for it.
func (e *engine) nextWorker(s int32) {
	server := &e.servers[s]
	server.active--
	for server.waiting.n > 0 {
		f := e.takeFirst(&server.waiting)
		if !e.gaveUp(f) {
			server.active++
			e.begin(f, &e.config.Jobs[e.flows[f].Class].Stages[0])
			return
		}
		e.abandon(f)
	}
}

// abandon has a flow leave the backlog whose client has gone.
func (e *engine) abandon(f int32) {
	e.hold(f)
	e.leave(f, TimedOut)
	e.release(f)
}

// request is when a flow's request comes to its server.
func (e *engine) request(f int32) {
	flow := &e.flows[f]
	if flow.phase != underWay {
		return
	}
	s := flow.Server
	server, cpu := &e.servers[s], &e.stations[s]
	e.touch(s)
	stage := &e.config.Jobs[flow.Class].Stages[0]
	switch {
	case cpu.sharing == nil && (cpu.busy < cpu.cpus || e.room(server, &cpu.waiting)):
		e.begin(f, stage)
	case cpu.sharing != nil && (server.workers == 0 || server.active < server.workers):
		server.active++
		e.begin(f, stage)
	case cpu.sharing != nil && e.room(server, &server.waiting):
		e.append(&server.waiting, f)
	case e.config.Silent:
		e.leave(f, TimedOut)
	default:
		e.leave(f, Refused)
	}
}

// room tells whether one more flow may wait.
func (e *engine) room(server *server, waiting *flowList) bool {
	return server.backlog < 0 || waiting.n < server.backlog
}

// leave has a flow leave its server.
func (e *engine) leave(f int32, outcome Outcome) {
	flow := &e.flows[f]
	e.touch(flow.Server)
	e.opened(flow.Server, -1)
	if agent := e.agentOf(flow.Server); agent != nil && agent.observer != nil && outcome == Completed {
		agent.observer.Served(e.now-flow.connected, int32(flow.found))
	}
	e.end(f, outcome)
}

// load is what a server says of itself.
func (e *engine) load(s int32) Load {
	server, cpu := &e.servers[s], &e.stations[s]
	l := Load{Open: server.open, CPUs: cpu.cpus, Capacity: float64(cpu.cpus) * cpu.speed}
	if cpu.sharing != nil {
		l.Busy, l.Waiting, l.Workers = server.active, server.waiting.n, server.workers
	} else {
		l.Busy, l.Waiting, l.Workers = cpu.busy, cpu.waiting.n, cpu.cpus
	}
	if agent := e.agentOf(s); agent != nil && agent.estimator != nil {
		l.Latency = agent.estimator.Latency(l)
	}
	return l
}
