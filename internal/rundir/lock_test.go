// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// TestLockIsHeldOnce has many goroutines lock and unlock one file. Each unlock removes the file.
func TestLockIsHeldOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var holders, locked atomic.Int32
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 3000 {
				file, err := openLocked(path)
				if err != nil {
					continue // another goroutine has it
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

// If a lock is refused, the error names the process that holds it, or says that root is needed.
func TestLockSaysWhy(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("locks of instances need root")
	}
	instance := fmt.Sprintf("test-%d-lock", os.Getpid())
	file, err := Lock(instance)
	testhost.Must(t, err)
	_, err = Lock(instance)
	holder := fmt.Sprintf("instance %q is already running: process %d, since 20", instance,
		os.Getpid())
	if err == nil || !strings.HasPrefix(err.Error(), holder) {
		t.Errorf("error %v, want %s...", err, holder)
	}
	testhost.Must(t, Unlock(file))
	denied := &os.PathError{Op: "open", Path: LockFile("lb"), Err: unix.EACCES}
	const want = `instance "lb": needs root: open /run/segue/lb.lock: permission denied`
	if got := refused("lb", denied).Error(); got != want {
		t.Errorf("error %s, want %s", got, want)
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

// TestLockIsPrivate checks that other users cannot open the lock, whatever the umask. Otherwise they
// could hold it, and so prevent a start.
func TestLockIsPrivate(t *testing.T) {
	before := unix.Umask(0)
	path := filepath.Join(t.TempDir(), "lb.lock")
	file, err := openLocked(path)
	unix.Umask(before)
	testhost.Must(t, err)
	defer file.Close()
	info, err := os.Stat(path)
	testhost.Must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
}
