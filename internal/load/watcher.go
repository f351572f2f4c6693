// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Default intervals between reads. They are short enough to follow the load, and cost next to
// nothing. The CPU time of a cgroup is a mean over the interval; a shorter one would give noise.
const (
	ApacheInterval       = 20 * time.Millisecond
	SharedMemoryInterval = 10 * time.Millisecond
	CgroupInterval       = 500 * time.Millisecond
)

// StaleAfter returns the time for which the last value counts after reads have begun to fail: a
// second, or four intervals if that is longer.
func StaleAfter(interval time.Duration) time.Duration {
	return max(time.Second, 4*interval)
}

// farewell is the time for which Run waits at its end for a read under way.
const farewell = time.Second

// State is the state of a source.
type State struct {
	Load Load
	At   time.Time // when Load was read; zero: never yet
	// Stale tells that Load is too old to use. The agent then accepts all offers.
	Stale bool
	// Err is the error of the last read; nil if it succeeded. A read that blocks leaves no error.
	Err error
}

// Watcher reads a source at an interval, and detects when it becomes stale.
type Watcher struct {
	source     Source
	interval   time.Duration
	staleAfter time.Duration
	report     func(State)
	log        *slog.Logger

	mu    sync.Mutex
	state State
}

// NewWatcher returns a watcher of a source. It works while Run runs.
//
// It calls report after each successful read, and once with Stale set when the source becomes
// stale: when no read has succeeded for staleAfter, counted from the start of Run if none ever has.
// Until the first call the load is unknown. Calls are never concurrent, and there are none after
// Run. The watcher logs when the source becomes stale and when it recovers; log should name the
// source.
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

// State returns the present state. Before the first successful read the source is stale.
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

// Run watches until the context ends, and returns nil. It abandons a read that still blocks,
// because such a read cannot be ended.
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
			w.log.Warn("load source does not return; it is abandoned and read anew")
		}
	}()

	deadline := time.NewTimer(w.staleAfter)
	defer deadline.Stop()
	told := false // whether stale was reported
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

// poll reads at once, and then at every interval. A read that takes longer skips intervals.
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

// record stores the result of a read, and tells whether the read succeeded.
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
	reason := "a read does not return"
	if state.Err != nil {
		reason = state.Err.Error()
	}
	w.log.Warn("load source is stale: accepting all offered connections", "reason", reason, "after", w.staleAfter)
	w.report(state)
}
