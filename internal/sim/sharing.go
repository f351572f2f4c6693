package sim

// Processor sharing: n flows on k processors of speed v have v·min(1, k/n) each. All have the same, so
// the work that one of them has had since the station was last empty says when each ends; this virtual
// time goes at their common speed. Only the first end is an event, and is moved when n changes.

// sharedRate is the speed of each of n flows.
func sharedRate(speed float64, cpus, n int32) float64 {
	if n <= cpus {
		return speed
	}
	return speed * float64(cpus) / float64(n)
}

// rate is the speed of virtual time.
func (st *station) rate() float64 { return sharedRate(st.speed, st.cpus, st.busy) }

// virtualAt is the virtual time at now.
func (st *station) virtualAt(now float64) float64 {
	if st.busy == 0 {
		return 0 // so that it stays small, and exact
	}
	return st.virtual + (now-st.since)*st.rate()
}

// advance brings virtual time up to now.
func (st *station) advance(now float64) { st.virtual, st.since = st.virtualAt(now), now }

// schedule sets the time of the first end.
func (e *engine) schedule(st *station) {
	at := never
	if st.busy > 0 {
		at = st.since + max(st.jobs[0].until-st.virtual, 0)/st.rate()
	}
	e.services.Set(st.slot, at)
}

// join has a flow share a station.
func (e *engine) join(st *station, f int32) {
	st.advance(e.now)
	job := share{until: st.virtual + e.flows[f].work, flow: f}
	st.jobs = append(st.jobs, job)
	st.busy++
	i := len(st.jobs) - 1
	for i > 0 && job.until < st.jobs[(i-1)/2].until {
		st.jobs[i] = st.jobs[(i-1)/2]
		i = (i - 1) / 2
	}
	st.jobs[i] = job
	e.schedule(st)
}

// unshare removes the flow that ends now.
func (e *engine) unshare(st *station) int32 {
	first := st.jobs[0]
	st.virtual, st.since = first.until, e.now
	n := len(st.jobs) - 1
	last := st.jobs[n]
	st.jobs = st.jobs[:n]
	i := 0
	for {
		child := 2*i + 1
		if child >= n {
			break
		}
		if child+1 < n && st.jobs[child+1].until < st.jobs[child].until {
			child++
		}
		if last.until <= st.jobs[child].until {
			break
		}
		st.jobs[i] = st.jobs[child]
		i = child
	}
	if n > 0 {
		st.jobs[i] = last
	}
	st.busy--
	e.schedule(st)
	return first.flow
}
