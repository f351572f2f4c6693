// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/loadshm"
)

// A report of the application reaches the agent's callback. The reports of ended applications do
// not.
func TestSharedMemoryIsWatched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	synctest.Test(t, func(t *testing.T) {
		w := startWatch(t, NewSharedMemory(path))
		defer w.stop()
		w.pass(0)
		if s := w.now(); !s.Stale || s.Err == nil {
			t.Errorf("before the application has started: %+v", s)
		}
		app, err := loadshm.Open(path, 4)
		testhost.Must(t, err)
		app.Begin()
		got := w.pass(loadshm.CheckInterval)
		if len(got) != 1 || got[0].Stale || got[0].Load != (Load{1, 4}) {
			t.Errorf("reports of a busy application: %+v; the state is %+v", got, w.now())
		}
		testhost.Must(t, app.Close())
		got = w.pass(testStaleAfter)
		if len(got) != 1 || !got[0].Stale || !errors.Is(got[0].Err, loadshm.ErrNobody) {
			t.Errorf("reports of one that has ended: %+v; the state is %+v", got, w.now())
		}
	})
}
