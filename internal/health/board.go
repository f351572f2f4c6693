// SPDX-License-Identifier: Apache-2.0

package health

// name is what a reader knows a target by.
type name struct{ service, server string }

// watch is a target that is being checked, and what is known of it.
type watch struct {
	target  Target
	stop    func()
	healthy bool
	reason  string
	told    bool // whether it is healthy, as far as the reader knows
}

func (w *watch) result() Result {
	return Result{
		Service: w.target.Service,
		Server:  w.target.Server,
		Healthy: w.healthy,
		Reason:  w.reason,
	}
}

// board holds the state of all targets, and knows which the reader does not.
type board struct {
	start   func(*watch)
	watches map[name]*watch
	untold  map[name]*watch
}

func newBoard(start func(*watch)) *board {
	return &board{start: start, watches: map[name]*watch{}, untold: map[name]*watch{}}
}

// replace makes the targets those that are watched. One with a name that was
// there before, but other values, starts anew, which may be news to the reader.
func (b *board) replace(targets []Target) {
	wanted := make(map[name]Target, len(targets))
	for _, t := range targets {
		wanted[name{t.Service, t.Server}] = t
	}
	for n, w := range b.watches {
		if _, ok := wanted[n]; !ok {
			w.stop()
			delete(b.watches, n)
			delete(b.untold, n)
		}
	}
	for n, t := range wanted {
		w := &watch{target: t, healthy: !t.Failing, told: !t.Failing}
		if old := b.watches[n]; old != nil {
			w.target.Failing = old.target.Failing // not new: its reader learns the rest from here
			if old.target == w.target {
				continue
			}
			w.target.Failing, w.healthy = false, true
			old.stop()
			w.told, w.reason = old.told, "its check has changed"
		}
		b.watches[n] = w
		b.mark(n)
		b.start(w)
	}
}

// record takes note of a verdict, unless its target is no longer watched.
func (b *board) record(v verdict) {
	n := name{v.watch.target.Service, v.watch.target.Server}
	if b.watches[n] != v.watch {
		return
	}
	v.watch.healthy, v.watch.reason = v.healthy, v.reason
	b.mark(n)
}

// mark puts a target among those that the reader must be told of, or not.
func (b *board) mark(n name) {
	if w := b.watches[n]; w.healthy != w.told {
		b.untold[n] = w
	} else {
		delete(b.untold, n)
	}
}

// news returns something that the reader does not know yet, if there is any.
func (b *board) news() (Result, bool) {
	for _, w := range b.untold {
		return w.result(), true
	}
	return Result{}, false
}

// delivered takes note that the reader has got a result, the last that news returned.
func (b *board) delivered(r Result) {
	n := name{r.Service, r.Server}
	b.watches[n].told = r.Healthy
	b.mark(n)
}
