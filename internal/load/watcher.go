// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

// StaleAfter returns the age at which a load is too old to use, if a source is read at an interval:
// a second, or four intervals if that is longer.
func StaleAfter(interval time.Duration) time.Duration {
	return max(time.Second, 4*interval)
}

// farewell is how long Run waits, at its end, for the end of a read.
const farewell = time.Second

// State is the state of a source.
type State struct {
	Load Load
	At   time.Time // when Load was read; zero: never yet
	// Stale tells that Load is too old to use. The accept policy then decides without a load.
	Stale bool
	// Err is the error of the last read that has ended. It is nil if the read succeeded.
	Err error
}

// Watcher reads a source at an interval, and detects when it becomes stale.
type Watcher struct {
	source     Source
	interval   time.Duration
	staleAfter time.Duration
	report     func(State)
	log        *slog.Logger
	newTicker  func(time.Duration) (ticker, error)

	mu    sync.Mutex
	state State
	since time.Time // the time of the last successful read, or else of the start of Run
	told  bool      // the present staleness was reported
	ended bool      // Run has ended: nothing more is reported
}

// NewWatcher returns a watcher of a source. It works while Run runs.
//
// It calls report after each successful read. A source becomes stale when no read has succeeded for
// staleAfter, counted from the last success or from the start of Run. The watcher then calls report
// once, with Stale set. Until the first call of report, the load is unknown. Calls are never
// concurrent, and there are none after Run. The function report must not call methods of the
// watcher. The watcher logs when the source becomes stale and when it recovers; log should name the
// source.
//
// If the source is an io.Closer, the watcher closes it after the last read.
func NewWatcher(source Source, interval, staleAfter time.Duration, log *slog.Logger, report func(State)) *Watcher {
	return &Watcher{
		source: source, interval: interval, staleAfter: staleAfter, report: report, log: log,
		newTicker: newKernelTicker, state: State{Stale: true},
	}
}

// Run watches until the context ends, and then returns nil. If a read still blocks then, Run
// abandons it, because such a read cannot be ended. Run returns an error at once if it gets no
// timer.
func (w *Watcher) Run(ctx context.Context) error {
	ticks, err := w.newTicker(w.interval)
	if err != nil {
		return err
	}
	w.since = time.Now()
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.poll(ticks)
	}()
	deadline := time.NewTimer(w.staleAfter)
	defer deadline.Stop()
	for {
		select {
		case <-ctx.Done():
			w.end(ticks, done)
			return nil
		case <-deadline.C:
			deadline.Reset(w.checkStale())
		}
	}
}

// end makes poll return, and waits for that. It gives up if a read blocks.
func (w *Watcher) end(ticks ticker, done <-chan struct{}) {
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	ticks.close()
	select {
	case <-done:
	case <-time.After(farewell):
		w.log.Warn("load source does not return; it is abandoned and read anew")
	}
}

// poll reads at once, and then at every tick. A read that takes longer than an interval skips
// ticks. poll reports the results itself: to wake another goroutine would cost more than the read.
func (w *Watcher) poll(ticks ticker) {
	for again := true; again; again = ticks.wait() {
		l, err := w.source.Read()
		w.record(l, err)
	}
	if source, ok := w.source.(io.Closer); ok {
		if err := source.Close(); err != nil {
			w.log.Error("close the load source", "error", err)
		}
	}
}

// record stores and reports the load of a successful read. Of a failed read, it only stores the
// error: the last load stays valid until checkStale finds it too old.
func (w *Watcher) record(l Load, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return
	}
	if w.state.Err = err; err != nil {
		return
	}
	w.since = time.Now()
	w.state = State{Load: l, At: w.since}
	if w.told {
		w.told = false
		w.log.Info("load source has recovered", "busy", l.Busy, "capacity", l.Capacity)
	}
	w.report(w.state)
}

// checkStale reports that the source is stale, if it is stale and that was not reported yet. It
// returns the time until the next check.
func (w *Watcher) checkStale() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if left := w.staleAfter - time.Since(w.since); left > 0 {
		return left // the source cannot become stale earlier
	}
	if !w.told {
		w.told = true
		w.state.Stale = true
		reason := "a read does not return"
		if w.state.Err != nil {
			reason = w.state.Err.Error()
		}
		w.log.Warn("load source is stale: deciding without a load", "reason", reason, "after", w.staleAfter)
		w.report(w.state)
	}
	return w.staleAfter
}
