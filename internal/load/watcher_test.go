// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// fake is a source that returns what a test requires.
type fake struct {
	mu    sync.Mutex
	load  Load
	err   error
	hang  chan struct{} // reads wait until it is closed; nil: they do not wait
	reads int
}

func (f *fake) Read() (Load, error) {
	f.mu.Lock()
	f.reads++
	hang := f.hang
	f.mu.Unlock()
	if hang != nil {
		<-hang
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.load, f.err
}

func (f *fake) set(load Load, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.load, f.err = load, err
}

// block makes reads wait from now on, until the returned function is called.
func (f *fake) block() (release func()) {
	hang := make(chan struct{})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hang = hang
	return func() {
		f.mu.Lock()
		f.hang = nil
		f.mu.Unlock()
		close(hang)
	}
}

// watch is a running watcher with its reports.
type watch struct {
	*Watcher
	stop func()
	log  bytes.Buffer

	mu      sync.Mutex
	reports []State
}

const (
	testInterval   = 100 * time.Millisecond
	testStaleAfter = time.Second
)

func startWatch(t *testing.T, source Source) *watch {
	w := &watch{}
	log := slog.New(slog.NewTextHandler(&w.log, nil))
	w.Watcher = NewWatcher(source, testInterval, testStaleAfter, log, w.report)
	w.newTicker = newFakeTicker
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.Run(ctx) }()
	w.stop = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	return w
}

// fakeTicker ticks in fake time, which the kernel's timers do not know.
type fakeTicker struct {
	*time.Ticker
	closed chan struct{}
}

func newFakeTicker(interval time.Duration) (ticker, error) {
	return fakeTicker{time.NewTicker(interval), make(chan struct{})}, nil
}

func (t fakeTicker) wait() bool {
	select {
	case <-t.C:
		return true
	case <-t.closed:
		return false
	}
}

func (t fakeTicker) close() {
	t.Stop()
	close(t.closed)
}

func (w *watch) report(s State) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reports = append(w.reports, s)
}

// now returns the present state. Before the first successful read the source is stale.
func (w *watch) now() State {
	w.Watcher.mu.Lock()
	defer w.Watcher.mu.Unlock()
	return w.state
}

// pass lets time pass, and returns the reports of that time.
func (w *watch) pass(d time.Duration) []State {
	time.Sleep(d) // in fake time this is exact, and ends when all goroutines wait
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	reports := w.reports
	w.reports = nil
	return reports
}

// logged returns the number of log lines so far that contain the words.
func (w *watch) logged(words string) int { return strings.Count(w.log.String(), words) }

func (w *watch) expect(t *testing.T, got []State, want ...State) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.EquateErrors()); diff != "" {
		t.Errorf("reports (-want +got):\n%s", diff)
	}
}

func TestWatcherReportsEachRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		f := &fake{load: Load{1, 4}}
		w := startWatch(t, f)
		defer w.stop()
		w.expect(t, w.pass(0), State{Load: Load{1, 4}, At: begin})
		f.set(Load{2, 4}, nil)
		w.expect(t, w.pass(2*testInterval),
			State{Load: Load{2, 4}, At: begin.Add(testInterval)},
			State{Load: Load{2, 4}, At: begin.Add(2 * testInterval)})
		if got, want := w.now(), (State{Load: Load{2, 4}, At: begin.Add(2 * testInterval)}); got != want {
			t.Errorf("state is %+v, want %+v", got, want)
		}
		if w.log.Len() != 0 {
			t.Errorf("log: %s", w.log.String())
		}
	})
}

func TestWatcherGoesStaleAndRecovers(t *testing.T) {
	broken := errors.New("broken pipe dream")
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		f := &fake{load: Load{1, 4}}
		w := startWatch(t, f)
		defer w.stop()
		w.pass(0)
		f.set(Load{}, broken)
		w.expect(t, w.pass(testStaleAfter-1)) // until then the last value counts
		if got, want := w.now(), (State{Load: Load{1, 4}, At: begin, Err: broken}); got != want {
			t.Errorf("state is %+v, want %+v", got, want)
		}
		w.expect(t, w.pass(1), State{Load: Load{1, 4}, At: begin, Stale: true, Err: broken})
		w.expect(t, w.pass(time.Minute)) // reported once
		if w.logged("stale") != 1 || w.logged("broken pipe dream") != 1 {
			t.Errorf("log: %s", w.log.String())
		}

		f.set(Load{3, 4}, nil)
		reports := w.pass(testInterval)
		if len(reports) != 1 || reports[0].Stale || reports[0].Load != (Load{3, 4}) || reports[0].Err != nil {
			t.Errorf("reports after recovery: %+v", reports)
		}
		w.pass(time.Minute)
		if w.logged("recovered") != 1 {
			t.Errorf("log: %s", w.log.String())
		}
		f.set(Load{}, broken)
		w.pass(time.Minute)
		if w.logged("stale") != 2 {
			t.Errorf("log: %s", w.log.String())
		}
	})
}

// Failures between successes change nothing, however many there are.
func TestWatcherForgivesFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{load: Load{1, 4}}
		w := startWatch(t, f)
		defer w.stop()
		for range 100 {
			f.set(Load{1, 4}, nil)
			w.pass(testInterval)
			f.set(Load{}, errors.New("at times"))
			for _, s := range w.pass(testStaleAfter - 2*testInterval) {
				if s.Stale {
					t.Fatalf("reported %+v", s)
				}
			}
		}
		if w.log.Len() != 0 {
			t.Errorf("log: %s", w.log.String())
		}
	})
}

func TestWatcherOfASourceThatNeverWas(t *testing.T) {
	missing := errors.New("no such thing")
	synctest.Test(t, func(t *testing.T) {
		f := &fake{err: missing}
		w := startWatch(t, f)
		defer w.stop()
		w.expect(t, w.pass(testStaleAfter-1))
		if !w.now().Stale {
			t.Errorf("state before any read: %+v", w.now())
		}
		w.expect(t, w.pass(1), State{Stale: true, Err: missing})
	})
}

func TestWatcherOfAHangingRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		f := &fake{load: Load{1, 4}}
		w := startWatch(t, f)
		defer w.stop()
		w.pass(0)
		release := f.block()
		w.expect(t, w.pass(testStaleAfter), State{Load: Load{1, 4}, At: begin, Stale: true})
		if w.logged("a read does not return") != 1 {
			t.Errorf("log: %s", w.log.String())
		}
		w.pass(time.Minute)
		if f.reads != 2 {
			t.Errorf("read %d times, want 2: one read at a time", f.reads)
		}
		release()
		if got := w.pass(0); len(got) == 0 || got[0].Stale || time.Since(got[0].At) != 0 {
			t.Errorf("reports when the read came back: %+v", got)
		}
	})
}

// Run ends although a read waits, and reports nothing afterwards.
func TestWatcherEndsDespiteAHangingRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{load: Load{1, 4}}
		release := f.block()
		w := startWatch(t, f)
		w.pass(testInterval)
		stopping := time.Now()
		w.stop()
		if took := time.Since(stopping); took != farewell {
			t.Errorf("Run ended after %v, want %v", took, farewell)
		}
		if w.logged("abandoned") != 1 {
			t.Errorf("log: %s", w.log.String())
		}
		release()
		w.expect(t, w.pass(time.Minute))
	})
}

func TestWatcherEndsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{load: Load{1, 4}}
		w := startWatch(t, f)
		w.pass(testInterval / 2)
		stopping := time.Now()
		w.stop()
		if took := time.Since(stopping); took != 0 {
			t.Errorf("Run took %v to end", took)
		}
		w.pass(time.Minute)
		if f.reads != 1 {
			t.Errorf("read %d times, want 1", f.reads)
		}
	})
}

func TestStaleAfter(t *testing.T) {
	for interval, want := range map[time.Duration]time.Duration{
		10 * time.Millisecond:  time.Second,
		250 * time.Millisecond: time.Second,
		time.Second:            4 * time.Second,
	} {
		if got := StaleAfter(interval); got != want {
			t.Errorf("at %v: %v, want %v", interval, got, want)
		}
	}
}
