// SPDX-License-Identifier: Apache-2.0

package sim

// World is the true state of a run. Only placements that serve as bounds for others may use it.
type World struct{ e *engine }

// Servers returns the number of servers.
func (w World) Servers() int { return len(w.e.servers) }

// Server returns the hardware of a server.
func (w World) Server(s int32) *Server { return &w.e.config.Servers[s] }

// Alive tells whether a server exists and has not failed. It may be draining.
func (w World) Alive(s int32) bool { return w.e.servers[s].alive }

// Open returns the number of flows of a server.
func (w World) Open(s int32) int { return int(w.e.servers[s].open) }

// Queued returns the number of flows in the queues of a server: their requests have arrived, and
// their last stage has not ended. Open also counts flows whose handshake is under way, and flows
// that are answered and kept open.
func (w World) Queued(s int32) int {
	e := w.e
	st := &e.stations[s]
	queued := st.busy + st.waiting.n + e.servers[s].waiting.n
	if io := int(s) + len(e.servers); io < len(e.stations) {
		queued += e.stations[io].busy
	}
	return int(queued)
}

// Load returns the load that a server would report now.
func (w World) Load(s int32) Load { return w.e.load(s) }

// Placement returns the placement of a balancer, for samples of its state.
func (w World) Placement(balancer int32) Placement { return w.e.balancers[balancer].placement }

// Balancers returns the number of balancers.
func (w World) Balancers() int { return len(w.e.balancers) }

// Flows returns the number of flows that have arrived so far.
func (w World) Flows() uint64 { return w.e.arrivals }

// Work returns the remaining work of a server's processors, for the flows in their present stages,
// in seconds. It does not include flows whose request is still on its way.
func (w World) Work(s int32) float64 {
	e := w.e
	st := &e.stations[s]
	sum := 0.0
	if st.sharing != nil {
		return st.sharing.Left(e.now) + e.waitingWork(&e.servers[s].waiting)
	}
	sum += e.waitingWork(&st.waiting)
	for slot := st.slot; slot < st.slot+st.cpus; slot++ {
		if e.slots[slot].flow != none {
			sum += (e.services.Key(slot) - e.now) * st.speed
		}
	}
	return sum
}

// waitingWork returns the work of the flows in a queue, for the stage that they wait for.
func (e *engine) waitingWork(l *flowList) float64 {
	sum, f := 0.0, l.head
	for range l.n {
		flow := &e.flows[f]
		sum += e.work(&flow.Flow, flow.stage)
		f = flow.next
	}
	return sum
}

// Next returns the work of a flow at the processors in its first stage. The placement calls it for
// the flow that it places.
func (w World) Next(f *Flow) float64 { return w.e.work(f, 0) }
