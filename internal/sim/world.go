// SPDX-License-Identifier: Apache-2.0

package sim

// World is the true state of a run. Only placements that are bounds for others may look at it.
type World struct{ e *engine }

// Servers is how many there are.
func (w World) Servers() int { return len(w.e.servers) }

// Server returns one's hardware.
func (w World) Server(s int32) *Server { return &w.e.config.Servers[s] }

// Alive tells whether a server is there and has not failed. It may be draining.
func (w World) Alive(s int32) bool { return w.e.servers[s].alive }

// Open is how many flows a server has.
func (w World) Open(s int32) int { return int(w.e.servers[s].open) }

// Load is what a server would say of itself now.
func (w World) Load(s int32) Load { return w.e.load(s) }

// Placement is that of a balancer, so that a sample can look into it.
func (w World) Placement(balancer int32) Placement { return w.e.balancers[balancer].placement }

// Balancers is how many there are.
func (w World) Balancers() int { return len(w.e.balancers) }

// Flows is how many flows have arrived so far.
func (w World) Flows() uint64 { return w.e.arrivals }

// Work is how many seconds of work a server has left at its processors, in their stages at present.
// Flows whose request is on its way are not in it.
func (w World) Work(s int32) float64 {
	e := w.e
	st := &e.stations[s]
	sum := 0.0
	if st.sharing != nil {
		virtual := st.virtualAt(e.now)
		for _, job := range st.sharing.jobs {
			sum += job.until - virtual
		}
		return sum + e.waitingWork(&e.servers[s].waiting)
	}
	sum += e.waitingWork(&st.waiting)
	for slot := st.slot; slot < st.slot+st.cpus; slot++ {
		if e.slots[slot].flow != none {
			sum += (e.services.Key(slot) - e.now) * st.speed
		}
	}
	return sum
}

// waitingWork is the work of a queue's flows, in the stage that they wait for.
func (e *engine) waitingWork(l *flowList) float64 {
	sum, f := 0.0, l.head
	for range l.n {
		flow := &e.flows[f]
		sum += e.work(&flow.Flow, flow.stage)
		f = flow.next
	}
	return sum
}

// Next is the flow's work at the processors in its first stage, which the placement of it decides
// about.
func (w World) Next(f *Flow) float64 { return w.e.work(f, 0) }
