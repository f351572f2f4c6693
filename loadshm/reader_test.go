// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

// longest is a time between two checks that no test reaches.
const longest = time.Hour

// newReader returns a reader that is closed when the test ends. A test that uses read and check
// decides when the reader checks.
func newReader(t *testing.T, path string) *Reader {
	r := NewReader(path)
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// due makes the reader check at its next read.
func due(r *Reader) { r.checked = time.Now().Add(-CheckInterval) }

// notDue makes the reader not check at its next read.
func notDue(r *Reader) { r.checked = time.Now().Add(longest) }

// read returns what the reader reads, without a check.
func read(t *testing.T, r *Reader) (busy, capacity uint32, err error) {
	t.Helper()
	notDue(r)
	return r.Read()
}

func expectRead(t *testing.T, r *Reader, busy, capacity uint32) {
	t.Helper()
	gotBusy, gotCapacity, err := read(t, r)
	if err != nil || gotBusy != busy || gotCapacity != capacity {
		t.Errorf("read %d of %d, error %v; want %d of %d", gotBusy, gotCapacity, err, busy, capacity)
	}
}

// check makes the reader check.
func check(r *Reader) {
	due(r)
	_, _, _ = r.Read()
}

// Between two checks a reader notices all reports, of old and new processes.
func TestReaderFollowsReports(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	first := open(t, path, 4)
	r := newReader(t, path)
	check(r)
	expectRead(t, r, 0, 4)
	first.Begin()
	expectRead(t, r, 1, 4)
	second := open(t, path, 6)
	defer second.Close()
	second.Begin()
	expectRead(t, r, 2, 10)
	testhost.Must(t, first.Close())
	expectRead(t, r, 1, 6)
	testhost.Must(t, r.Close())
	if busy, capacity, err := r.Read(); err != nil || busy != 1 || capacity != 6 {
		t.Errorf("read %d of %d after Close, error %v; want 1 of 6", busy, capacity, err)
	}
}

// A process that ends without Close counts until the next check. Another process that takes its
// slot after that check counts at once. It still counts after a further check, although its report
// is the one that the ended process has left.
func TestReaderFindsEndedProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	cmd := reporters["Go"](t, path)
	startReporter(t, cmd)
	r := newReader(t, path)
	check(r)
	expectRead(t, r, 1, 4)
	testhost.Must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	expectRead(t, r, 1, 4)
	check(r)
	if busy, capacity, err := read(t, r); !errors.Is(err, ErrNobody) {
		t.Errorf("read %d of %d, error %v; want %v", busy, capacity, err, ErrNobody)
	}
	next := open(t, path, 2)
	defer next.Close()
	expectRead(t, r, 0, 2)
	next.Set(1, 4) // the same content as the ended process has left
	check(r)
	expectRead(t, r, 1, 4)
}

// A check finds that the file was removed, replaced or truncated, and that it has appeared.
func TestReaderFollowsTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	r := newReader(t, path)
	refuses := func(want string) {
		t.Helper()
		if _, _, err := read(t, r); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	check(r)
	refuses("load: no such file")
	defer open(t, path, 4).Close()
	refuses("load: no such file")
	check(r)
	expectRead(t, r, 0, 4)

	testhost.Must(t, os.Remove(path))
	defer open(t, path, 5).Close()
	expectRead(t, r, 0, 4)
	check(r)
	expectRead(t, r, 0, 5)

	testhost.Must(t, os.Truncate(path, 0))
	refuses("load: was truncated")
	check(r)
	refuses("load: size is 0 bytes, not 4096")
	if err := os.Truncate(path, fileSize); err != nil { // for the store of the reporter's Close
		t.Fatal(err)
	}
	testhost.Must(t, os.Remove(path))
	defer open(t, path, 6).Close()
	check(r)
	expectRead(t, r, 0, 6)
}

// Between two checks a read allocates no memory, and does not map the file again.
func TestReaderIsFrugal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	defer open(t, path, 4).Close()
	r := newReader(t, path)
	check(r)
	page := &r.page[0]
	if n := testing.AllocsPerRun(100, func() { expectRead(t, r, 0, 4) }); n != 0 {
		t.Errorf("a read allocates memory %v times", n)
	}
	if page != &r.page[0] {
		t.Error("a read has mapped the file again")
	}
}

// A reader checks by itself when CheckInterval has passed.
func TestReaderChecksByTheClock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	r := newReader(t, path)
	if _, _, err := r.Read(); err == nil {
		t.Fatal("read a file that does not exist")
	}
	defer open(t, path, 4).Close()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(CheckInterval / 10) {
		busy, capacity, err := r.Read()
		if err == nil && busy == 0 && capacity == 4 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("a minute after the file has appeared: %v", err)
		}
	}
}
