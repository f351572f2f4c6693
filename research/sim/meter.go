// SPDX-License-Identifier: Apache-2.0

package sim

import "math"

// use contains the use of a server over time.
type use struct {
	since    float64 // the end of the time that the sums cover
	openTime float64 // integral of the number of flows, in flow seconds
	busyTime float64 // integral of the busy processors, in processor seconds
	taken    uint64
}

// meter measures while its window is open.
type meter struct {
	open      bool
	low, high uint64  // numbers of the measured flows, if they are chosen by number
	from, to  float64 // times of the measured flows, if they are chosen by time
	opened    float64
	loads
}

// loads are sums over the servers that balancers know. x is the number of a server's open flows,
// divided by its processors.
type loads struct {
	since        float64 // the end of the time that the integrals cover
	flows        int64   // number of open flows
	sum, squares float64 // sums of x and x²
	integrals
}

// integrals are integrals over time.
type integrals struct {
	sum, squares float64 // of sum and squares in loads
	instant      float64 // of Jain's index at each moment
	servers      float64 // of the number of servers that balancers know
	// busy and open are the integrals of the busy processors and of the open flows of all servers.
	// meter does not keep them: engine.integrals and keepUse compute them from the servers.
	busy, open float64
}

// newMeter determines which flows are measured: by their number if Config.Connections is set,
// otherwise by their time if Config.Duration is set, otherwise all.
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

// watchWindow opens or closes the window when a flow arrives. The window opens with the first
// measured flow, and closes with the first flow after the measured ones.
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

// openWindow begins to measure: all sums start at 0.
func (e *engine) openWindow() {
	m := &e.meter
	e.measureAll()
	m.open, m.opened = true, e.now
	e.series.restart(e.integrals())
	m.integrals = integrals{}
	for s := range e.servers {
		e.servers[s].use = use{since: e.now}
	}
}

// closeWindow ends the measurement, and stores the use of the servers in the window.
func (e *engine) closeWindow() {
	e.measureAll()
	e.meter.open = false
	e.keepUse()
}

// measureAll brings all sums up to the present time.
func (e *engine) measureAll() {
	e.meter.advance(e.now, len(e.live))
	for s := range e.servers {
		e.touch(int32(s))
	}
}

// touch brings the sums of a server up to the present time. It is called before each change of the
// server's state.
func (e *engine) touch(s int32) {
	server := &e.servers[s]
	elapsed := e.now - server.use.since
	if elapsed == 0 {
		return
	}
	cpu := &e.stations[s]
	server.use.since = e.now
	server.use.openTime += float64(server.open) * elapsed
	// Flows that share the processors can be more than the processors.
	server.use.busyTime += float64(min(cpu.busy, cpu.cpus)) * elapsed
}

// advance brings the integrals up to the present time.
func (l *loads) advance(now float64, servers int) {
	elapsed := now - l.since
	if elapsed == 0 {
		return
	}
	l.since = now
	l.integrals.sum += l.sum * elapsed
	l.integrals.squares += l.squares * elapsed
	l.integrals.servers += float64(servers) * elapsed
	if l.sum > 0 {
		l.integrals.instant += l.sum * l.sum / (l.squares * float64(servers)) * elapsed
	} else { // without flows, the index counts as 1
		l.integrals.instant += elapsed
	}
}

// keepLoads stores the means of the integrals i over an elapsed time in m.
func (e *engine) keepLoads(m *Measures, i *integrals, elapsed float64) {
	m.Elapsed = elapsed
	m.Utilisation = i.busy / (e.processors * elapsed)
	m.Open = i.open / (float64(len(e.servers)) * elapsed)
	m.Fairness = i.sum * i.sum / (i.squares * i.servers)
	m.InstantFairness = i.instant / elapsed
}

// changeOpen adds by, which is 1 or -1, to the number of a server's open flows.
func (e *engine) changeOpen(s, by int32) {
	e.meter.advance(e.now, len(e.live))
	server := &e.servers[s]
	before := server.open
	server.open += by
	if !server.live { // the sums are over live servers only
		return
	}
	l := &e.meter.loads
	if l.flows += int64(by); l.flows == 0 {
		l.sum, l.squares = 0, 0 // without flows, only rounding errors are left in the sums
		return
	}
	each := e.stations[s].each
	x, y := float64(before)*each, float64(server.open)*each
	l.sum += y - x
	l.squares += y*y - x*x
}

// sumLive computes the sums over the live servers again, after the set of live servers has changed.
func (e *engine) sumLive() {
	m := &e.meter
	m.flows, m.sum, m.squares = 0, 0, 0
	for _, s := range e.live {
		m.flows += int64(e.servers[s].open)
		x := float64(e.servers[s].open) / float64(e.stations[s].cpus)
		m.sum += x
		m.squares += x * x
	}
}

// keepUse stores the use of the servers in the window.
func (e *engine) keepUse() {
	m, r := &e.meter, e.result
	elapsed := e.now - m.opened
	window := m.integrals
	for s := range e.servers {
		use := &e.servers[s].use
		r.Servers[s] = ServerUse{
			CPUs:        e.stations[s].cpus,
			Utilisation: use.busyTime / (float64(e.stations[s].cpus) * elapsed),
			Open:        use.openTime / elapsed,
		}
		window.busy += use.busyTime
		window.open += use.openTime
	}
	e.keepLoads(&r.Measures, &window, elapsed)
}

// count calls a function with each Measures that counts the flow: with those of the whole run if
// the flow is measured, and with those of the interval in which its SYN was sent, if there are
// intervals.
func (e *engine) count(flow *flow, count func(*Measures)) {
	if flow.measured {
		count(&e.result.Measures)
	}
	if m := e.series.of(flow.sent); m != nil {
		count(m)
	}
}

// countTaken counts a flow that a server takes.
func (e *engine) countTaken(flow *flow, offer *Offer, s int32) {
	if flow.measured {
		e.servers[s].use.taken++
	}
	wrongful := uint64(0)
	// Refusals count as wrongful only if the last of several servers had to take the flow.
	if offer.At > 0 && offer.At == offer.N-1 && e.wrongful(offer, s) {
		wrongful = 1
	}
	e.count(flow, func(m *Measures) {
		m.Hops += uint64(flow.hops)
		m.Wrongful += wrongful
	})
}

// wrongful tells whether a server passed the flow on although it then had fewer open flows than
// server s, which must take the flow (6LB, section V-E). If the servers have different numbers of
// processors, it compares flows per processor.
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
	e.count(flow, func(m *Measures) { m.ended(flow.outcome, response) })
	if e.config.Completed != nil && flow.measured {
		e.config.Completed(e.run, Ended{
			Sent: flow.sent, Response: response, Number: flow.Number, Server: flow.Server,
			Balancer: int32(flow.balancer), Class: int32(flow.Class), Hops: int32(flow.hops), Outcome: flow.outcome,
		})
	}
}
