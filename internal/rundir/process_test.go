// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// A lock's holder is found while it holds the lock, with the time since which it holds the lock.
func TestFindHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	none := func(when string) {
		t.Helper()
		if found, err := findHolder(path); found != nil || err != nil {
			t.Errorf("%s: %+v, error %v; want none", when, found, err)
		}
	}
	none("without a file")
	testhost.Must(t, os.WriteFile(path, nil, 0o600))
	long := time.Now().Add(-time.Hour)
	testhost.Must(t, os.Chtimes(path, long, long))
	none("before")
	file, err := openLocked(path)
	testhost.Must(t, err)
	found, err := findHolder(path)
	if err != nil || found == nil || found.PID != os.Getpid() || time.Since(found.Since) > time.Minute {
		t.Errorf("%+v, error %v; want %d since just now", found, err, os.Getpid())
	}
	testhost.Must(t, file.Close())
	none("afterwards")
}

func TestMain(m *testing.M) {
	testhost.EnterOverlay()
	os.Exit(m.Run())
}

func TestFindHolderOnOverlayfs(t *testing.T) {
	testhost.RerunOnOverlay(t, "TestFindHolder")
}
