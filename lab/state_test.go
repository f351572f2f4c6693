// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// A lock that is released after a moment does not count as another process's.
func TestLockIsWaitedFor(t *testing.T) {
	name := fmt.Sprintf("lock%d", os.Getpid())
	if err := os.MkdirAll(stateDir(name), 0o755); err != nil {
		t.Skipf("cannot write to %s: %v", stateRoot, err)
	}
	t.Cleanup(func() {
		for dir := stateDir(name); os.Remove(dir) == nil; dir = filepath.Dir(dir) {
		}
	})
	held, err := lockState(name)
	testhost.Must(t, err)
	time.AfterFunc(lockPatience/10, held.unlock)
	lock, err := lockState(name)
	testhost.Must(t, err)
	defer lock.unlock()
	if _, err := lockState(name); err == nil {
		t.Error("two hold the lock")
	}
}

// Overrides can be written before any process has written its state.
func TestStateDirectory(t *testing.T) {
	topology := DefaultTopology()
	topology.Name = fmt.Sprintf("state%d", os.Getpid())
	l := &Lab{Name: topology.Name, Topology: topology}
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		t.Skipf("cannot write to %s: %v", stateRoot, err)
	}
	lock, err := l.createState()
	testhost.Must(t, err)
	t.Cleanup(func() {
		lock.unlock()
		if err := os.RemoveAll(l.path()); err != nil {
			t.Error(err)
		}
		_ = os.Remove(stateRoot) // if this test has made it
	})
	if _, err := os.Stat(l.path("state")); err != nil {
		t.Error(err)
	}
}
