// SPDX-License-Identifier: Apache-2.0

package sim

// MostIntervals is the maximum number of intervals of Config.Every that a run keeps, from the
// start.
const MostIntervals = 10_000

// rounding is a factor by which times are multiplied, so that rounding errors have no effect when a
// time should equal the start or the end of an interval.
const rounding = 1 + 1e-9

// series contains the intervals of Config.Every so far.
type series struct {
	every float64 // 0 means that there are no intervals
	// all contains the intervals in which flows have arrived. The first `ended` of them are over.
	all   []Measures
	ended int
	mark  integrals // integrals at the beginning of the present interval
}

// of returns the Measures of the interval in which a flow arrived. It returns nil if there are no
// intervals, or if this interval is after the first MostIntervals.
func (s *series) of(sent float64) *Measures {
	if s.every == 0 {
		return nil
	}
	i := int(sent / s.every * rounding)
	if i >= MostIntervals {
		return nil
	}
	for len(s.all) <= i {
		s.all = append(s.all, Measures{})
	}
	return &s.all[i]
}

// end returns the time at which the present interval ends.
func (s *series) end() float64 { return float64(s.ended+1) * s.every }

// restart is called when the engine's integrals are set to 0. at is their value before that. The
// present interval goes on.
func (s *series) restart(at integrals) { s.mark = s.mark.minus(at) }

// minus returns the difference of all integrals.
func (i integrals) minus(other integrals) integrals {
	return integrals{
		i.sum - other.sum, i.squares - other.squares, i.instant - other.instant, i.servers - other.servers,
		i.busy - other.busy, i.open - other.open,
	}
}

// integrals returns the integrals up to now. It changes nothing, so that results do not depend on
// calls of it.
func (e *engine) integrals() integrals {
	l := e.meter.loads
	l.advance(e.now, len(e.live))
	for s := range e.servers {
		server, cpu := &e.servers[s], &e.stations[s]
		elapsed := e.now - server.use.since
		l.busy += server.use.busyTime + float64(min(cpu.busy, cpu.cpus))*elapsed
		l.open += server.use.openTime + float64(server.open)*elapsed
	}
	return l.integrals
}

// endInterval stores the results of the interval that ends now, and schedules the end of the next
// one. After the end of the arrivals, and when MostIntervals are stored, it does neither.
func (e *engine) endInterval() {
	s := &e.series
	if e.now > e.until*rounding || s.ended == MostIntervals {
		return
	}
	now := e.integrals()
	grown := now.minus(s.mark)
	// The middle of the interval selects its Measures.
	e.keepLoads(s.of((float64(s.ended)+0.5)*s.every), &grown, s.every)
	s.mark = now
	s.ended++
	e.queue.push(s.end(), interval, 0)
}

// finishSeries stores the results of the last intervals: those that end after all flows have ended,
// but not after the end of the arrivals. The engine's loop has dropped the events for these ends.
func (e *engine) finishSeries() {
	s := &e.series
	for s.every > 0 && s.end() <= e.until*rounding && s.ended < MostIntervals {
		e.now = s.end()
		e.endInterval()
	}
	e.result.Series = s.all[:s.ended]
}
