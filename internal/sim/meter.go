package sim

import "math"

// use is how much of a server was used over time.
type use struct {
	since    float64 // the time up to which the sums go
	openTime float64 // flows · seconds
	busyTime float64 // processors · seconds
	taken    uint64
}

// meter measures while its window is open.
type meter struct {
	open      bool
	low, high uint64  // flows that are measured, if they are chosen by number
	from, to  float64 // likewise by time
	since     float64
	opened    float64
	// Of x, the open flows for each processor of the servers that balancers know: the sums over them of
	// x and x², and their integrals over time; and the integral of Jain's index at each instant.
	sum, squares             float64
	sumTime, squaresTime     float64
	instantTime, serversTime float64
}

// newMeter finds out which flows are measured.
func newMeter(c *Config) meter {
	m := meter{high: math.MaxUint64, to: never}
	switch {
	case c.Connections > 0:
		m.low = uint64(c.Warmup * float64(c.Connections))
		m.high = c.Connections - uint64(c.Cooldown*float64(c.Connections))
	case c.Duration > 0:
		m.from, m.to = c.Warmup*c.Duration, (1-c.Cooldown)*c.Duration
	}
	return m
}

// watchWindow opens or closes the window when the flow that arrives now is the first inside or behind
// it.
func (e *engine) watchWindow() {
	m := &e.meter
	inside := e.arrivals >= m.low && e.arrivals < m.high && e.now >= m.from && e.now < m.to
	switch {
	case inside && !m.open:
		e.openWindow()
	case m.open && !inside:
		e.closeWindow()
	}
}

func (e *engine) openWindow() {
	m := &e.meter
	e.measureAll()
	m.open, m.opened = true, e.now
	m.sumTime, m.squaresTime, m.instantTime, m.serversTime = 0, 0, 0, 0
	for s := range e.servers {
		e.servers[s].use = use{since: e.now}
	}
}

func (e *engine) closeWindow() {
	e.measureAll()
	e.meter.open = false
	e.keepUse()
}

// measureAll brings all sums up to now.
func (e *engine) measureAll() {
	e.balance()
	for s := range e.servers {
		e.touch(int32(s))
	}
}

// touch brings the sums of a server up to now. It comes before each change of its state.
func (e *engine) touch(s int32) {
	server := &e.servers[s]
	elapsed := e.now - server.use.since
	if elapsed == 0 {
		return
	}
	cpu := &e.stations[s]
	server.use.since = e.now
	server.use.openTime += float64(server.open) * elapsed
	server.use.busyTime += float64(min(cpu.busy, cpu.cpus)) * elapsed
}

// balance brings the integrals over the servers' sums up to now.
func (e *engine) balance() {
	m := &e.meter
	elapsed := e.now - m.since
	if elapsed == 0 {
		return
	}
	m.since = e.now
	m.sumTime += m.sum * elapsed
	m.squaresTime += m.squares * elapsed
	m.serversTime += float64(len(e.live)) * elapsed
	if m.sum > 0 {
		m.instantTime += m.sum * m.sum / (m.squares * float64(len(e.live))) * elapsed
	} else {
		m.instantTime += elapsed
	}
}

// opened changes the number of a server's open flows.
func (e *engine) opened(s, by int32) {
	e.balance()
	server := &e.servers[s]
	before := server.open
	server.open += by
	if !server.live {
		return
	}
	each := e.stations[s].each
	x, y := float64(before)*each, float64(server.open)*each
	e.meter.sum += y - x
	e.meter.squares += y*y - x*x
}

// compareLive makes the sums over the servers anew, when others are live.
func (e *engine) compareLive() {
	m := &e.meter
	m.sum, m.squares = 0, 0
	for _, s := range e.live {
		x := float64(e.servers[s].open) / float64(e.stations[s].cpus)
		m.sum += x
		m.squares += x * x
	}
}

// keepUse keeps what the servers were used in the window.
func (e *engine) keepUse() {
	m, r := &e.meter, e.result
	elapsed := e.now - m.opened
	r.Elapsed = elapsed
	for s := range e.servers {
		use := &e.servers[s].use
		r.Servers[s] = ServerUse{
			CPUs:        e.stations[s].cpus,
			Utilisation: use.busyTime / (float64(e.stations[s].cpus) * elapsed),
			Open:        use.openTime / elapsed,
		}
	}
	if m.squaresTime > 0 {
		r.Fairness = m.sumTime * m.sumTime / (m.squaresTime * m.serversTime)
	}
	r.InstantFairness = m.instantTime / elapsed
}

// countTaken counts a flow that a server is about to take.
func (e *engine) countTaken(flow *flow, offer *Offer, s int32) {
	e.servers[s].use.taken++
	e.result.Hops += uint64(flow.hops)
	if offer.At == offer.N-1 && e.wrongful(offer, s) {
		e.result.Wrongful++
	}
}

// wrongful tells whether a server that passed the flow on, as it was then, had fewer open flows than
// the one that has to take it (6LB, section V-E); for each processor, if they differ.
func (e *engine) wrongful(offer *Offer, s int32) bool {
	open, cpus := e.servers[s].open, e.stations[s].cpus
	for i := range offer.At {
		passed := &offer.Loads[i]
		if int64(passed.Open)*int64(cpus) < int64(open)*int64(passed.CPUs) {
			return true
		}
	}
	return false
}

// countEnd counts a flow that has ended.
func (e *engine) countEnd(flow *flow, response float64) {
	if !flow.measured {
		return
	}
	r := e.result
	r.Outcomes[flow.outcome]++
	if flow.outcome == Completed || flow.outcome == TimedOut {
		r.Response.Add(response)
		r.batches.add(response)
	}
	if e.config.Completed != nil {
		e.config.Completed(e.run, Ended{
			Sent: flow.sent, Response: response, Number: flow.Number, Server: flow.Server,
			Balancer: int32(flow.balancer), Class: int32(flow.Class), Hops: int32(flow.hops), Outcome: flow.outcome,
		})
	}
}
