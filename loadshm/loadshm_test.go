// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

func open(t *testing.T, path string, capacity uint32) *Reporter {
	t.Helper()
	r, err := Open(path, capacity)
	testhost.Must(t, err)
	return r
}

func expect(t *testing.T, path string, busy, capacity uint32) {
	t.Helper()
	gotBusy, gotCapacity, err := Read(path)
	testhost.Must(t, err)
	if gotBusy != busy || gotCapacity != capacity {
		t.Errorf("read %d of %d, want %d of %d", gotBusy, gotCapacity, busy, capacity)
	}
}

func expectNobody(t *testing.T, path string) {
	t.Helper()
	if busy, capacity, err := Read(path); !errors.Is(err, ErrNobody) {
		t.Errorf("read %d of %d, error %v; want %v", busy, capacity, err, ErrNobody)
	}
}

func TestReportersAreSummed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	first := open(t, path, 4)
	expect(t, path, 0, 4)
	first.Begin()
	first.Begin()
	second := open(t, path, 6)
	second.Begin()
	expect(t, path, 3, 10)
	first.End()
	second.Set(5, 7)
	expect(t, path, 6, 11)
	testhost.Must(t, first.Close())
	expect(t, path, 5, 7)
	testhost.Must(t, second.Close())
	expectNobody(t, path)
}

func TestEndWithoutBegin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	r := open(t, path, 4)
	defer r.Close()
	r.End()
	expect(t, path, 0, 4)
}

// A sum above the largest uint32 is read as the largest uint32.
func TestSumsDoNotOverflow(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	for range 2 {
		r := open(t, path, math.MaxUint32)
		defer r.Close()
		r.Set(math.MaxUint32, math.MaxUint32)
	}
	expect(t, path, math.MaxUint32, math.MaxUint32)
}

// If all slots are taken, Open fails. A slot that is released can be taken again.
func TestSlotsRunOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	var all []*Reporter
	for range slots {
		all = append(all, open(t, path, 1))
	}
	expect(t, path, 0, slots)
	if _, err := Open(path, 1); err == nil || !strings.Contains(err.Error(), "slots are taken") {
		t.Errorf("one more than there are slots: %v", err)
	}
	testhost.Must(t, all[7].Close()) // any one of them
	all[7] = open(t, path, 2)
	expect(t, path, 0, slots+1)
	for _, r := range all {
		r.Close()
	}
}

// A reader must never see the busy number of one report with the capacity of another.
func TestReportsAreNotTorn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	r := open(t, path, 1)
	defer r.Close()
	done := make(chan struct{})
	var writer sync.WaitGroup
	defer writer.Wait()
	defer close(done)
	writer.Go(func() {
		for n := uint32(1); ; n = n*5 + 1 {
			select {
			case <-done:
				return
			default:
				r.Set(^(n | 1), n|1) // busy is ^capacity
			}
		}
	})
	for range 10000 {
		busy, capacity, err := Read(path)
		testhost.Must(t, err)
		if busy != ^capacity && (busy != 0 || capacity != 1) {
			t.Fatalf("read %#x of %#x, which was never written", busy, capacity)
		}
	}
}

func TestManyThreadsCount(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	r := open(t, path, 8)
	defer r.Close()
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for range 10000 {
				r.Begin()
				r.End()
			}
			r.Begin()
		})
	}
	workers.Wait()
	expect(t, path, 8, 8)
}

// While the file is truncated again and again, a reader gets an error or a value, and does not
// crash.
func TestReadSurvivesTruncation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	r := open(t, path, 4)
	defer r.Close()
	done := make(chan struct{})
	var cutter sync.WaitGroup
	defer cutter.Wait()
	defer close(done)
	cutter.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_ = os.Truncate(path, 0)
				_ = os.Truncate(path, fileSize)
			}
		}
	})
	for range 20000 {
		if busy, capacity, err := Read(path); err == nil && (busy != 0 || capacity != 4) {
			t.Fatalf("read %d of %d, which was never written", busy, capacity)
		}
	}
}

// The file is empty, so a read of its mapping causes SIGBUS.
func TestFaultBecomesError(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "empty"))
	testhost.Must(t, err)
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, fileSize, unix.PROT_READ, unix.MAP_SHARED)
	testhost.Must(t, err)
	defer unix.Munmap(page)
	if _, err := copyPage(page); err == nil || !strings.Contains(err.Error(), "truncated") {
		t.Errorf("copying a page that is not there: %v", err)
	}
}

func TestReadRefuses(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	testhost.Must(t, unix.Mkfifo(fifo, 0o600))
	file := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		testhost.Must(t, os.WriteFile(path, content, 0o600))
		return path
	}
	old := make([]byte, fileSize)
	copy(old, "segueshm")
	old[versionOffset] = 9
	for _, c := range []struct{ path, want string }{
		{filepath.Join(dir, "none"), "none: no such file"},
		{dir, "not a regular file"},
		{fifo, "fifo: not a regular file"},
		{"/dev/null", "/dev/null: not a regular file"},
		{file("short", []byte("x")), "short: size is 1 bytes, not 4096"},
		{file("zero", make([]byte, fileSize)), "zero: begins with 0x0"},
		{file("other", append([]byte("segueshx"), old[8:]...)), "not a file of load reports"},
		{file("old", old), "old: version is 9, not 1"},
	} {
		if _, _, err := Read(c.path); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.path, err, c.want)
		}
	}
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	short := filepath.Join(dir, "short")
	testhost.Must(t, os.WriteFile(short, []byte("mine"), 0o600))
	for _, c := range []struct {
		path     string
		capacity uint32
		want     string
	}{
		{filepath.Join(dir, "load"), 0, "capacity is 0"},
		{filepath.Join(dir, "none", "load"), 1, "no such file"},
		{short, 1, "size is 4 bytes, not 4096"},
	} {
		if _, err := Open(c.path, c.capacity); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q", c.path, err, c.want)
		}
	}
	if content, _ := os.ReadFile(short); string(content) != "mine" {
		t.Errorf("a file of another kind was changed to %q", content)
	}
}

// A Reporter without references in the program still counts, because the process lives.
func TestForgottenReporter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	open(t, path, 4)
	for range 2 { // a finalizer would run after the first collection
		runtime.GC()
	}
	expect(t, path, 0, 4)
}

func BenchmarkReport(b *testing.B) {
	r, err := Open(filepath.Join(b.TempDir(), "load"), 8)
	testhost.Must(b, err)
	defer r.Close()
	for b.Loop() {
		r.Begin()
		r.End()
	}
}

// BenchmarkReader measures reads between two checks.
func BenchmarkReader(b *testing.B) {
	path := filepath.Join(b.TempDir(), "load")
	w, err := Open(path, 8)
	testhost.Must(b, err)
	defer w.Close()
	r := NewReader(path)
	defer r.Close()
	for b.Loop() {
		if _, _, err := r.Read(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRead measures a read with a check.
func BenchmarkRead(b *testing.B) {
	path := filepath.Join(b.TempDir(), "load")
	r, err := Open(path, 8)
	testhost.Must(b, err)
	defer r.Close()
	for b.Loop() {
		if _, _, err := Read(path); err != nil {
			b.Fatal(err)
		}
	}
}
