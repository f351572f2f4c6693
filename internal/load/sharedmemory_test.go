// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/segue-lb/segue/loadshm"
)

// From the application's report to the agent's callback, and what an application leaves behind that
// has ended.
func TestSharedMemoryIsWatched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	synctest.Test(t, func(t *testing.T) {
		reports := make(chan State, 1000)
		w := NewWatcher(NewSharedMemory(path), SharedMemoryInterval, time.Second, slog.New(slog.DiscardHandler),
			func(s State) { reports <- s })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go w.Run(ctx)
		synctest.Wait()
		if s := w.State(); !s.Stale || s.Err == nil {
			t.Errorf("before the application has started: %+v", s)
		}
		app, err := loadshm.Open(path, 4)
		if err != nil {
			t.Fatal(err)
		}
		app.Begin()
		time.Sleep(SharedMemoryInterval)
		synctest.Wait()
		if s := <-reports; s.Stale || s.Load != (Load{1, 4}) {
			t.Errorf("of a busy application: %+v", s)
		}
		if err := app.Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if s := <-reports; !s.Stale || !errors.Is(s.Err, loadshm.ErrNobody) {
			t.Errorf("of one that has ended: %+v", s)
		}
	})
}
