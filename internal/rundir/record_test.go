// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// reading returns the record that a reader finds for the process that holds a lock.
func reading(t *testing.T, lock string) *Record {
	t.Helper()
	process, err := findHolder(lock)
	testhost.Must(t, err)
	record, err := readRecord(recordFile(lock), process)
	testhost.Must(t, err)
	return record
}

// TestRecord follows a process from its start to its end.
func TestRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lb.lock")
	lock, err := openLocked(path)
	testhost.Must(t, err)
	if record := reading(t, path); record != nil {
		t.Errorf("before it was written: %+v", record)
	}
	fixed := []desired.Setting{{Field: "node.interface", Value: "eth0"}}
	before := time.Now()
	r := NewRecorder(lock, "balancer", "lb.yaml", fixed, slog.New(slog.DiscardHandler))
	record := reading(t, path)
	if record == nil {
		t.Fatal("there is no record")
	}
	started := record.Configuration
	absolute, err := filepath.Abs("lb.yaml")
	testhost.Must(t, err)
	if started.File != absolute || started.Read.Before(before) || started.Refused != nil {
		t.Errorf("at the start: %+v", started)
	}
	if diff := cmp.Diff(fixed, record.Fixed); diff != "" || record.Role != "balancer" {
		t.Errorf("role %q, fixed settings, -want +got:\n%s", record.Role, diff)
	}

	failure := errors.New("line 1: bad\nline 2: worse")
	fail := r.TrackReloads(func(context.Context) error { return failure })
	if err := fail(t.Context()); err != failure {
		t.Errorf("error: %v, want that of the reload", err)
	}
	refused := reading(t, path).Configuration
	if !refused.Read.Equal(started.Read) || refused.Refused == nil ||
		refused.Refused.Time.Before(started.Read) {
		t.Fatalf("after a failure: %+v", refused)
	}
	problems := []string{"line 1: bad", "line 2: worse"}
	if diff := cmp.Diff(problems, refused.Refused.Problems); diff != "" {
		t.Errorf("problems, -want +got:\n%s", diff)
	}
	if err := r.TrackReloads(func(context.Context) error { return nil })(t.Context()); err != nil {
		t.Error(err)
	}
	after := reading(t, path).Configuration
	if after.Refused != nil || !after.Read.After(started.Read) {
		t.Errorf("after a success: %+v", after)
	}

	if info, err := os.Stat(recordFile(path)); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v: others must not read the seed", info.Mode(), err)
	}
	if err := errors.Join(r.Close(), r.Close(), lock.Close()); err != nil {
		t.Error(err)
	}
	if files, err := filepath.Glob(filepath.Dir(path) + "/*"); err != nil || len(files) != 1 {
		t.Errorf("left after the end: %v, %v; want the lock alone", files, err)
	}
}

// TestRecordOfKilledProcess checks that the record of a killed process is ignored while no process
// runs, and when the next process runs.
func TestRecordOfKilledProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lb.lock")
	start := func() *os.File {
		lock, err := openLocked(path)
		testhost.Must(t, err)
		return lock
	}
	lock := start()
	NewRecorder(lock, "balancer", "lb.yaml", nil, slog.New(slog.DiscardHandler))
	_ = lock.Close() // as the kernel does for a killed process
	if record := reading(t, path); record != nil {
		t.Errorf("nobody runs: %+v", record)
	}
	lock = start()
	if record := reading(t, path); record != nil {
		t.Errorf("another process runs: %+v", record)
	}
	if err := Unlock(lock); err != nil {
		t.Error(err)
	}
	if files, err := filepath.Glob(filepath.Dir(path) + "/*"); err != nil || len(files) != 0 {
		t.Errorf("left of an instance that is gone: %v, %v", files, err)
	}
}

// TestRecordThatCannotBeWritten checks that the process continues and logs the error.
func TestRecordThatCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	lock, err := openLocked(filepath.Join(dir, "lb.lock"))
	testhost.Must(t, err)
	defer lock.Close()
	testhost.Must(t, os.MkdirAll(filepath.Join(dir, "lb.json", "in the way"), 0o700))
	var log bytes.Buffer
	r := NewRecorder(lock, "balancer", "lb.yaml", nil, slog.New(slog.NewTextHandler(&log, nil)))
	if !strings.Contains(log.String(), "status cannot show the configuration") {
		t.Errorf("logged %q", log.String())
	}
	if err := r.TrackReloads(func(context.Context) error { return nil })(t.Context()); err != nil {
		t.Error(err)
	}
}
