// SPDX-License-Identifier: Apache-2.0

package loadshm

import (
	"bufio"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/testhost"
)

// pinDir returns a folder of the BPF file system, which is removed with its pins.
func pinDir(t *testing.T) string {
	t.Helper()
	testhost.NeedBPF(t)
	dir, err := os.MkdirTemp("/sys/fs/bpf", "loadshm")
	testhost.Must(t, err)
	t.Cleanup(func() { testhost.Must(t, os.RemoveAll(dir)) })
	return dir
}

func openedMap(t *testing.T, path string) *Map {
	t.Helper()
	m, err := OpenMap(path)
	testhost.Must(t, err)
	t.Cleanup(func() { testhost.Must(t, m.Close()) })
	return m
}

// expectSum checks the load in a map. A capacity of 0 means that no process reports.
func expectSum(t *testing.T, m *Map, busy, capacity uint32) {
	t.Helper()
	gotBusy, gotCapacity, err := m.Sum()
	if capacity == 0 {
		if !errors.Is(err, ErrNobody) {
			t.Errorf("load %d of %d, error %v; want nobody", gotBusy, gotCapacity, err)
		}
		return
	}
	if err != nil || gotBusy != busy || gotCapacity != capacity {
		t.Errorf("load %d of %d, error %v; want %d of %d", gotBusy, gotCapacity, err, busy, capacity)
	}
}

// Reporters and the agent share a map, whoever creates it. Its mode lets the group use it.
func TestReportersOfAMap(t *testing.T) {
	path := filepath.Join(pinDir(t), "shop")
	a, err := Open(path, 4)
	testhost.Must(t, err)
	m := openedMap(t, path)
	expectSum(t, m, 0, 4)
	b, err := Open(path, 2)
	testhost.Must(t, err)
	a.Begin()
	b.Begin()
	b.Begin()
	b.End()
	expectSum(t, m, 2, 6)
	testhost.Must(t, m.ClearEnded())
	expectSum(t, m, 2, 6)
	testhost.Must(t, a.Close())
	expectSum(t, m, 1, 2)
	testhost.Must(t, b.Close())
	expectSum(t, m, 0, 0)
	info, err := os.Stat(path)
	testhost.Must(t, err)
	if info.Mode().Perm() != 0o660 {
		t.Errorf("the pin has mode %v", info.Mode())
	}
	if used := half(m.page, usedOffset).Load(); used != 2 {
		t.Errorf("%d slots have been used, want 2", used)
	}
}

// Processes that create one map at the same time get the same one.
func TestMapIsCreatedOnce(t *testing.T) {
	path := filepath.Join(pinDir(t), "shop")
	var starts sync.WaitGroup
	for range 8 {
		starts.Go(func() {
			r, err := Open(path, 1)
			if err != nil {
				t.Error(err)
				return
			}
			r.Begin()
		})
	}
	starts.Wait()
	expectSum(t, openedMap(t, path), 8, 8)
}

// A killed process counts until ClearEnded, although its children live on.
func TestMapForgetsKilledProcesses(t *testing.T) {
	for name, command := range reporters {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(pinDir(t), "load")
			cmd := command(t, path)
			startReporter(t, cmd)
			m := openedMap(t, path)
			testhost.Must(t, m.ClearEnded())
			expectSum(t, m, 1, 4)
			testhost.Must(t, cmd.Process.Kill())
			_ = cmd.Wait()
			expectSum(t, m, 1, 4)
			testhost.Must(t, m.ClearEnded())
			expectSum(t, m, 0, 0)
			if used := half(m.page, usedOffset).Load(); used != 1 {
				t.Errorf("%d slots have been used, want 1", used)
			}
		})
	}
}

// ClearEnded makes the data path read all slots that are in use, although the number of used slots
// is wrong.
func TestUsedSlotsAreFound(t *testing.T) {
	path := filepath.Join(pinDir(t), "load")
	m := openedMap(t, path)
	for range 3 {
		open(t, path, 1)
	}
	half(m.page, usedOffset).Store(1)
	testhost.Must(t, m.ClearEnded())
	if used := half(m.page, usedOffset).Load(); used != 3 {
		t.Errorf("%d slots are read, want 3", used)
	}
}

// A pin of another kind of map is refused, and so is a path that is no pin.
func TestOtherMapsAreRefused(t *testing.T) {
	dir := pinDir(t)
	path := filepath.Join(dir, "other")
	other, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 512, Flags: 1 << 10})
	testhost.Must(t, err)
	defer other.Close()
	testhost.Must(t, other.Pin(path))
	const want = "is a map of type 2 with 512 values of 8 bytes (flags 0x400), so it is not a map of load reports"
	if _, err := Open(path, 1); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %s", err, want)
	}
	if _, err := OpenMap(filepath.Join(t.TempDir(), "load")); err == nil || !strings.Contains(err.Error(), "is not a folder of a BPF file system") {
		t.Errorf("outside of a BPF file system: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "none", "load"), 1); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("in a missing folder: %v", err)
	}
}

// A map that was replaced is noticed.
func TestReplacedMap(t *testing.T) {
	path := filepath.Join(pinDir(t), "load")
	m := openedMap(t, path)
	expect := func(want bool) {
		t.Helper()
		if got, err := m.IsPinned(); err != nil || got != want {
			t.Errorf("pinned: %v, error %v; want %v", got, err, want)
		}
	}
	expect(true)
	testhost.Must(t, os.Remove(path))
	expect(false)
	openedMap(t, path)
	expect(false)
}

// Workers that cannot open the file or the map themselves have one capacity together, which counts
// while one of them lives.
func TestWorkers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "load")
	t.Run("file", func(t *testing.T) { followWorkers(t, path, func() (uint32, uint32, error) { return Read(path) }) })
	pin := filepath.Join(pinDir(t), "load")
	t.Run("map", func(t *testing.T) {
		m := openedMap(t, pin)
		followWorkers(t, pin, func() (uint32, uint32, error) {
			testhost.Must(t, m.ClearEnded())
			return m.Sum()
		})
	})
}

// followWorkers runs testdata/workers.c, and checks the load after each of its steps.
func followWorkers(t *testing.T, path string, read func() (busy, capacity uint32, err error)) {
	cmd := compileC(t, "testdata/workers.c")
	cmd.Args = append(cmd.Args, path)
	stdin, err := cmd.StdinPipe()
	testhost.Must(t, err)
	out, err := cmd.StdoutPipe()
	testhost.Must(t, err)
	testhost.Must(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for _, c := range []struct {
		line           string
		busy, capacity uint32
	}{{"busy", 2, 7}, {"killed", 1, 7}, {"ended", 0, 0}} {
		if lines.Scan(); lines.Text() != c.line {
			t.Fatalf("%s said %q, want %q", cmd.Path, lines.Text(), c.line)
		}
		busy, capacity, err := read()
		if busy != c.busy || capacity != c.capacity || (capacity == 0) != errors.Is(err, ErrNobody) {
			t.Errorf("%s: %d of %d, error %v; want %d of %d", c.line, busy, capacity, err, c.busy, c.capacity)
		}
		_, err = stdin.Write([]byte("\n"))
		testhost.Must(t, err)
	}
	testhost.Must(t, cmd.Wait())
}
