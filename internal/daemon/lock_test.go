// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
)

// TestLockIsHeldOnce has many lock and unlock one file, which each unlock removes.
func TestLockIsHeldOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var holders, locked atomic.Int32
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 3000 {
				file, err := lockFile(path)
				if err != nil {
					continue // another has it
				}
				locked.Add(1)
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d hold the lock", n)
				}
				holders.Add(-1)
				if err := Unlock(file); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	if locked.Load() == 0 {
		t.Error("nobody came to hold the lock")
	}
}

func TestLockRefusesNames(t *testing.T) {
	for _, name := range []string{"", "..", "../lb", "a/b", "."} {
		if file, err := Lock(name); err == nil {
			t.Errorf("locked %s for instance %q", file.Name(), name)
			_ = os.Remove(file.Name())
			_ = file.Close()
		}
	}
}
