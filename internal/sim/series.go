// SPDX-License-Identifier: Apache-2.0

package sim

// MostIntervals is how many intervals of Config.Every a run keeps: the first.
const MostIntervals = 10_000

// rounding is the factor by which the multiple of an interval may be more than the time of a flow that arrives
// then, or of the end of arrivals.
const rounding = 1 + 1e-9

// series are the intervals of Config.Every so far.
type series struct {
	every float64 // 0 for none
	// all are those that flows have arrived in, whether they are over or not; ended of them are.
	all   []Measures
	ended int
	mark  integrals // at the beginning of the one that goes on
}

// of is the interval in which a flow arrived; nil where it is not kept.
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

// end is when the interval that goes on is over.
func (s *series) end() float64 { return float64(s.ended+1) * s.every }

// restart goes on from integrals that begin again at 0.
func (s *series) restart(at integrals) { s.mark = s.mark.minus(at) }

func (i integrals) minus(other integrals) integrals {
	return integrals{
		i.sum - other.sum, i.squares - other.squares, i.instant - other.instant, i.servers - other.servers,
		i.busy - other.busy, i.open - other.open,
	}
}

// integrals are those up to now. It changes nothing, so that results are the same whether it is called or
// not.
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

// endInterval keeps what there is to say of the interval that ends now, if flows arrived up to its end.
func (e *engine) endInterval() {
	s := &e.series
	if e.now > e.until*rounding || s.ended == MostIntervals {
		return
	}
	now := e.integrals()
	over := now.minus(s.mark)
	e.keepLoads(s.of((float64(s.ended)+0.5)*s.every), &over, s.every)
	s.mark = now
	s.ended++
	e.queue.push(s.end(), interval, 0)
}

// finishSeries ends the intervals in which flows could have arrived after the last one had ended.
func (e *engine) finishSeries() {
	s := &e.series
	for s.every > 0 && s.end() <= e.until*rounding && s.ended < MostIntervals {
		e.now = s.end()
		e.endInterval()
	}
	e.result.Series = s.all[:s.ended]
}
