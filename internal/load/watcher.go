// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// How often sources are read, unless told otherwise: as often as costs next to nothing. The CPU of
// a cgroup is a mean over the interval, which below that would be noise.
const (
	ApacheInterval       = 20 * time.Millisecond
	SharedMemoryInterval = 10 * time.Millisecond
	CgroupInterval       = 500 * time.Millisecond
)

// StaleAfter is for how long the last value of a source counts that cannot be read any more, at the
// interval at which it is read: a second, or four intervals where that is longer.
func StaleAfter(interval time.Duration) time.Duration {
	return max(time.Second, 4*interval)
}

// farewell is for how long Run waits at its end for a read under way. One that takes longer hangs.
const farewell = time.Second

// State is what is known of a source.
type State struct {
	Load Load
	At   time.Time // when Load was read; zero: never yet
	// Stale: too old to go by. The agent takes everything that it is offered.
	Stale bool
	// Err is why the last read has failed; nil if it has not. A read that hangs leaves no error.
	Err error
}

// Watcher reads a source at an interval, and knows when it has gone stale.
type Watcher struct {
	source     Source
	interval   time.Duration
	staleAfter time.Duration
	report     func(State)
	log        *slog.Logger

	mu    sync.Mutex
	state State
}

// NewWatcher returns a watcher of a source. It reads, and reports, while Run does.
//
// It calls report after each successful read, and with Stale set once when the source goes stale:
// when no read has succeeded for staleAfter, counted from the start of Run if none ever has. Until
// the first call nothing is known. Calls are never concurrent, and none comes after Run. Of going stale
// and of recovery it writes a line to the log, which should say which source it is.
func NewWatcher(source Source, interval, staleAfter time.Duration, log *slog.Logger, report func(State)) *Watcher {
	return &Watcher{
		source:     source,
		interval:   interval,
		staleAfter: staleAfter,
		report:     report,
		log:        log,
		state:      State{Stale: true},
	}
}

// State returns what is known now. Before the first successful read the source is stale.
func (w *Watcher) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

// result is the outcome of one read.
type result struct {
	load Load
	at   time.Time
	err  error
}

// Run watches until the context ends, and returns nil. A read that hangs then is left behind: no
// one can end it.
func (w *Watcher) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	results := make(chan result)
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.poll(ctx, results)
	}()
	defer func() {
		cancel()
		select {
		case <-done:
		case <-time.After(farewell):
			w.log.Warn("load source hangs; leaving it behind")
		}
	}()

	deadline := time.NewTimer(w.staleAfter)
	defer deadline.Stop()
	told := false // that it is stale
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-results:
			if !w.record(r) {
				continue
			}
			deadline.Reset(w.staleAfter)
			if told {
				told = false
				w.log.Info("load source has recovered", "busy", r.load.Busy, "capacity", r.load.Capacity)
			}
			w.report(w.State())
		case <-deadline.C:
			told = true
			w.goStale()
		}
	}
}

// poll reads at every interval, the first time at once. A read that takes longer skips intervals.
func (w *Watcher) poll(ctx context.Context, results chan<- result) {
	ticker := time.NewTicker(w.interval)
	defer ticker.Stop()
	for {
		var r result
		r.load, r.err = w.source.Read()
		r.at = time.Now()
		select {
		case results <- r:
		case <-ctx.Done():
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// record takes note of a read, and says whether it has succeeded.
func (w *Watcher) record(r result) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state.Err = r.err; r.err != nil {
		return false
	}
	w.state = State{Load: r.load, At: r.at}
	return true
}

func (w *Watcher) goStale() {
	w.mu.Lock()
	w.state.Stale = true
	state := w.state
	w.mu.Unlock()
	reason := "reading it hangs"
	if state.Err != nil {
		reason = state.Err.Error()
	}
	w.log.Warn("load source is stale: taking all connections that are offered", "reason", reason, "after", w.staleAfter)
	w.report(state)
}
