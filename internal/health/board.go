// SPDX-License-Identifier: Apache-2.0

package health

// name identifies a target for the reader.
type name struct{ service, server string }

// watch is a target and its state.
type watch struct {
	target Target
	stop   func()
	state  State
	reason string
	told   State // the state that the reader knows
}

// result returns the state for the reader.
func (w *watch) result() Result {
	return Result{w.target.Service, w.target.Server, w.state == Healthy, w.reason}
}

// board holds the state of all targets, and the news for the reader.
type board struct {
	start   func(*watch) // begins to check a target, and sets stop
	watches map[name]*watch
	untold  map[name]*watch // those whose state the reader does not know yet
	wanted  int             // the number of targets, including those that are not started yet
}

func newBoard(start func(*watch)) *board {
	return &board{start: start, watches: map[name]*watch{}, untold: map[name]*watch{}}
}

// replace replaces the watched targets. A target that equals a former one in all but State keeps
// its watch. Any other target starts in its State, which the reader knows.
func (b *board) replace(targets []Target) {
	wanted := make(map[name]Target, len(targets))
	for _, t := range targets {
		wanted[name{t.Service, t.Server}] = t
	}
	b.wanted = len(wanted)
	for n, w := range b.watches {
		if _, ok := wanted[n]; !ok {
			w.stop()
			delete(b.watches, n)
			delete(b.untold, n)
		}
	}
	for n, t := range wanted {
		w := b.watches[n]
		if w == nil || !w.target.checksAs(&t) {
			if w != nil {
				w.stop()
			}
			w = &watch{target: t, state: t.State}
			b.watches[n] = w
			b.start(w)
		}
		w.told = t.State
		b.mark(n)
	}
}

// record stores the new state of a target, unless the target is no longer watched.
func (b *board) record(change stateChange) {
	w := change.watch
	n := name{w.target.Service, w.target.Server}
	if b.watches[n] != w {
		return
	}
	w.state, w.reason = stateOf(change.healthy), change.reason
	b.mark(n)
}

// mark notes whether the reader must still receive the state of a target. The reader never receives
// the state Unchecked.
func (b *board) mark(n name) {
	if w := b.watches[n]; w.state != w.told && w.state != Unchecked {
		b.untold[n] = w
	} else {
		delete(b.untold, n)
	}
}

// stateOf returns the state of a target that was checked.
func stateOf(healthy bool) State {
	if healthy {
		return Healthy
	}
	return Failing
}

// news returns a result that the reader has not received yet, if there is one.
func (b *board) news() (Result, bool) {
	for _, w := range b.untold {
		return w.result(), true
	}
	return Result{}, false
}

// delivered notes that the reader has received a result that news returned.
func (b *board) delivered(r Result) {
	n := name{r.Service, r.Server}
	b.watches[n].told = stateOf(r.Healthy)
	b.mark(n)
}
