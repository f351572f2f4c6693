// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"math"

	"github.com/segue-lb/segue/research/sim/processor"
)

// server is the state of a server. In engine.stations, the station of its processors has the same
// index as the server. If there are jobs with IO, the station of its IO queue has the index of the
// server plus len(servers). A server fills one cache line.
type server struct {
	alive    bool
	live     bool     // balancers consider it live: it is in engine.live
	passesOn bool     // while not alive: it passes offers on, because only its application has failed
	workers  int32    // 0 means no limit
	backlog  int32    // -1 means no limit
	open     int32    // flows that the server has
	idle     int32    // those of them that are answered and kept open
	active   int32    // with processor sharing: number of workers in use
	waiting  flowList // with processor sharing: flows that wait for a worker
	use      use
}

// agent is the agent of a server.
type agent struct {
	Agent
	// The optional interfaces of the agent. Those that it does not have are nil.
	observer  Observer
	estimator Estimator
}

// agentOf returns the agent of a server. It returns nil if servers have no agents, and so take all
// offered flows.
func (e *engine) agentOf(s int32) *agent {
	if e.agents == nil {
		return nil
	}
	return &e.agents[s]
}

// station is a queue of a server.
type station struct {
	server int32
	cpus   int32
	// slot is the first slot of the station. There is one for each processor, or only one if the
	// processors are shared.
	slot    int32
	busy    int32 // number of flows in service
	speed   float64
	each    float64 // 1/cpus
	waiting flowList
	sharing *processor.Sharing[int32] // nil if the discipline is FIFO
}

// slot is the place where a service ends: a processor, or a shared station.
type slot struct {
	station int32
	flow    int32 // the flow in service; none if the station is shared
}

var never = math.Inf(1)

// enter lets a flow begin a stage at a station. If the processors are shared, the flow joins the
// others. Otherwise it gets a free processor, or waits for one.
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

// serviceEnds removes the flow from a slot when its service has ended, gives the slot to the next
// flow, and begins the next stage of the flow that was served.
func (e *engine) serviceEnds(slot int32) {
	st := &e.stations[e.slots[slot].station]
	var f int32
	e.touch(st.server)
	if st.sharing != nil {
		f = e.endShared(st)
	} else {
		f = e.slots[slot].flow
		e.nextInLine(st, slot)
	}
	e.hold(f)
	e.stageEnds(f)
	e.release(f)
}

// nextInLine gives a free processor to the flow that has waited longest and whose client still
// waits.
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

// gaveUp tells whether a flow's client has given up.
func (e *engine) gaveUp(f int32) bool {
	return e.config.Timeout > 0 && e.now-e.flows[f].sent >= e.config.Timeout
}

// stageEnds begins the next stage of a flow. After the last stage, the flow leaves the server, or
// its connection stays open and idle. In both cases, its worker is free.
func (e *engine) stageEnds(f int32) {
	flow := &e.flows[f]
	flow.stage++
	stages := e.config.Jobs[flow.Class].Stages
	if int(flow.stage) < len(stages) {
		e.begin(f, &stages[flow.stage])
		return
	}
	s := flow.Server
	if idle := &e.config.Jobs[flow.Class].Idle; idle.zero() {
		e.leave(f, Completed)
	} else {
		e.fallIdle(f, idle.Sample(stageDraw(flow.Key, idleDraw)))
	}
	if e.stations[s].sharing != nil { // with FIFO there are no workers
		e.nextWorker(s)
	}
}

// begin begins a stage of a flow.
func (e *engine) begin(f int32, stage *Stage) {
	station := e.flows[f].Server
	if stage.Queue == IO {
		station += int32(len(e.servers))
	}
	e.enter(station, f)
}

// work returns the work of a stage of a flow, in seconds.
func (e *engine) work(f *Flow, stage uint8) float64 {
	s := &e.config.Jobs[f.Class].Stages[stage]
	work := s.Work.Sample(stageDraw(f.Key, stage))
	if s.PerUnit > 0 {
		work += s.PerUnit * e.sizes[f.Number]
	}
	return work
}

// nextWorker frees the worker of a flow that was served. It gives the worker to the flow that has
// waited longest and whose client still waits.
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

// abandon ends a flow whose client gave up while the flow was in the backlog. The caller has
// removed the flow from the backlog.
func (e *engine) abandon(f int32) {
	e.hold(f)
	e.leave(f, TimedOut)
	e.release(f)
}

// request handles a flow's request that arrives at its server. The flow begins its first stage, or
// waits in the backlog. If the backlog is full, the server drops the flow (Config.Silent) or
// refuses it.
func (e *engine) request(f int32) {
	flow := &e.flows[f]
	if flow.phase != underWay {
		return
	}
	s := flow.Server
	server, cpu := &e.servers[s], &e.stations[s]
	e.touch(s)
	stage := &e.config.Jobs[flow.Class].Stages[0]
	fifo := cpu.sharing == nil
	processorFree := cpu.busy < cpu.cpus
	workerFree := server.workers == 0 || server.active < server.workers
	switch {
	case fifo && (processorFree || e.room(server, &cpu.waiting)):
		e.begin(f, stage) // puts the flow into the queue if no processor is free
	case !fifo && workerFree:
		server.active++
		e.begin(f, stage)
	case !fifo && e.room(server, &server.waiting):
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

// leave removes a flow from its server.
func (e *engine) leave(f int32, outcome Outcome) {
	flow := &e.flows[f]
	e.touch(flow.Server)
	e.changeOpen(flow.Server, -1)
	if outcome == Completed {
		e.observe(flow)
	}
	e.end(f, outcome)
}

// observe tells the server's agent that a flow was served.
func (e *engine) observe(flow *flow) {
	if agent := e.agentOf(flow.Server); agent != nil && agent.observer != nil {
		agent.observer.Served(e.now-flow.connected, int32(flow.others))
	}
}

// load returns the load that a server reports.
func (e *engine) load(s int32) Load {
	server, cpu := &e.servers[s], &e.stations[s]
	l := Load{Open: server.open, Idle: server.idle, CPUs: cpu.cpus, Capacity: float64(cpu.cpus) * cpu.speed}
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
