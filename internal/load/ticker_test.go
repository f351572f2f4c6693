// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

func startTicker(t *testing.T, interval time.Duration) ticker {
	t.Helper()
	ticks, err := newKernelTicker(interval)
	testhost.Must(t, err)
	return ticks
}

func TestKernelTicker(t *testing.T) {
	const interval = 5 * time.Millisecond
	ticks := startTicker(t, interval)
	defer ticks.close()
	begin := time.Now()
	for range 10 {
		if !ticks.wait() {
			t.Fatal("the ticker has ended by itself")
		}
	}
	if took := time.Since(begin); took < 9*interval { // the first tick may be late, and the next not
		t.Errorf("10 ticks took %v, want at least %v", took, 9*interval)
	}
}

// Ticks that nobody has waited for count as one tick: the next one is not due at once.
func TestKernelTickerSkips(t *testing.T) {
	const interval = 50 * time.Millisecond
	ticks := startTicker(t, interval)
	defer ticks.close()
	begin := time.Now()
	time.Sleep(10 * interval)
	for range 3 {
		ticks.wait()
	}
	if took := time.Since(begin); took < 11*interval {
		t.Errorf("waited for 3 ticks until %v, want at least %v", took, 11*interval)
	}
}

func TestKernelTickerCloses(t *testing.T) {
	ticks := startTicker(t, time.Hour)
	waited := make(chan bool)
	go func() { waited <- ticks.wait() }()
	ticks.close()
	select {
	case ticked := <-waited:
		if ticked {
			t.Error("the ticker has ticked")
		}
	case <-time.After(limit):
		t.Fatal("a closed ticker is still waited for")
	}
	if ticks.wait() {
		t.Error("a closed ticker ticks")
	}
}

// A watcher with the kernel's timer reads at its interval.
func TestWatcherInRealTime(t *testing.T) {
	reports := make(chan State, 100)
	w := NewWatcher(&fake{load: Load{1, 4}}, time.Millisecond, time.Minute, slog.New(slog.DiscardHandler), func(s State) {
		select {
		case reports <- s:
		default:
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	for range 5 {
		select {
		case s := <-reports:
			if s.Stale || s.Load != (Load{1, 4}) {
				t.Fatalf("reported %+v", s)
			}
		case <-time.After(limit):
			t.Fatal("no report")
		}
	}
}
