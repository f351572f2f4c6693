// SPDX-License-Identifier: Apache-2.0

package sim

// Processor sharing: n flows on k processors of speed v get v·min(1, k/n) each. All flows get the
// same work, so the work that each has got since the station was last empty determines the ends.
// This work is the virtual time. It advances with the common speed of the flows. Only the first
// end is an event, which moves when n changes.

// sharing is the additional state of a shared station.
type sharing struct {
	jobs    []share // a heap; the first flow ends next
	virtual float64 // virtual time: the work that a flow has got that has been there from the start
	since   float64 // the time at which virtual was computed
}

// share is a flow in a shared station. The flow leaves the station when virtual reaches until.
type share struct {
	until float64
	flow  int32
}

// sharedRate returns the speed of each of n flows.
func sharedRate(speed float64, cpus, n int32) float64 {
	if n <= cpus {
		return speed
	}
	return speed * float64(cpus) / float64(n)
}

// rate returns the speed of virtual time.
func (st *station) rate() float64 { return sharedRate(st.speed, st.cpus, st.busy) }

// virtualAt returns the virtual time at now.
func (st *station) virtualAt(now float64) float64 {
	if st.busy == 0 {
		return 0 // so that virtual stays small, and therefore exact
	}
	return st.sharing.virtual + (now-st.sharing.since)*st.rate()
}

// advance brings virtual time up to now.
func (st *station) advance(now float64) {
	st.sharing.virtual, st.sharing.since = st.virtualAt(now), now
}

// schedule sets the time of the first end.
func (e *engine) schedule(st *station) {
	at := never
	if st.busy > 0 {
		shared := st.sharing
		at = shared.since + max(shared.jobs[0].until-shared.virtual, 0)/st.rate()
	}
	e.services.Set(st.slot, at)
}

// join adds a flow to a station.
func (e *engine) join(st *station, f int32) {
	st.advance(e.now)
	shared := st.sharing
	flow := &e.flows[f]
	job := share{until: shared.virtual + e.work(&flow.Flow, flow.stage), flow: f}
	shared.jobs = append(shared.jobs, job)
	st.busy++
	i := len(shared.jobs) - 1
	for i > 0 && job.until < shared.jobs[(i-1)/2].until {
		shared.jobs[i] = shared.jobs[(i-1)/2]
		i = (i - 1) / 2
	}
	shared.jobs[i] = job
	e.schedule(st)
}

// unshare removes the flow that ends now.
func (e *engine) unshare(st *station) int32 {
	shared := st.sharing
	first := shared.jobs[0]
	shared.virtual, shared.since = first.until, e.now
	n := len(shared.jobs) - 1
	last := shared.jobs[n]
	shared.jobs = shared.jobs[:n]
	i := 0
	for {
		child := 2*i + 1
		if child >= n {
			break
		}
		if child+1 < n && shared.jobs[child+1].until < shared.jobs[child].until {
			child++
		}
		if last.until <= shared.jobs[child].until {
			break
		}
		shared.jobs[i] = shared.jobs[child]
		i = child
	}
	if n > 0 {
		shared.jobs[i] = last
	}
	st.busy--
	e.schedule(st)
	return first.flow
}
