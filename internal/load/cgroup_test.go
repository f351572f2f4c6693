// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// group is a fake control group.
type group struct{ path string }

func newGroup(t *testing.T, path string) group {
	t.Helper()
	testhost.Must(t, os.Mkdir(path, 0o755))
	g := group{path}
	g.write(t, "cgroup.controllers", "cpu\n")
	return g
}

func (g group) write(t *testing.T, name, content string) {
	t.Helper()
	testhost.Must(t, os.WriteFile(filepath.Join(g.path, name), []byte(content), 0o644))
}

func (g group) used(t *testing.T, usec uint64) {
	g.write(t, "cpu.stat", fmt.Sprintf("usage_usec %d\nuser_usec 1\nsystem_usec 2\n", usec))
}

func TestCgroupMeansOverIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		parent := newGroup(t, filepath.Join(t.TempDir(), "parent"))
		parent.write(t, "cpu.max", "150000 100000\n")
		g := newGroup(t, filepath.Join(parent.path, "child"))
		g.write(t, "cpu.max", "max 100000\n")
		g.used(t, 5e6)
		c := NewCgroup(g.path)
		if _, err := c.Read(); !errors.Is(err, errFirst) {
			t.Errorf("first read: %v", err)
		}
		expect := func(busy uint32) {
			t.Helper()
			got, err := c.Read()
			if want := (Load{busy, min(1500, onlineCPUs(t)*1000)}); err != nil || got != want {
				t.Errorf("read %+v, error %v; want %+v", got, err, want)
			}
		}
		time.Sleep(2 * time.Second)
		g.used(t, 5e6+1e6)
		expect(500)
		time.Sleep(500 * time.Millisecond)
		expect(0)
		time.Sleep(500 * time.Millisecond)
		g.used(t, 6e6+617_300)
		expect(1235)

		// The application is restarted in a new group of the same name.
		testhost.Must(t, os.RemoveAll(g.path))
		if _, err := c.Read(); err == nil || !strings.Contains(err.Error(), g.path+": no such file") {
			t.Errorf("of a group that has gone: %v", err)
		}
		g = newGroup(t, g.path)
		g.used(t, 7e6)
		time.Sleep(time.Second)
		if _, err := c.Read(); !errors.Is(err, errFirst) {
			t.Errorf("first read of the new group: %v", err)
		}
		time.Sleep(time.Second)
		g.used(t, 7.25e6)
		expect(250)
		time.Sleep(time.Second)
		g.used(t, 1e6)
		if _, err := c.Read(); !errors.Is(err, errFirst) {
			t.Errorf("of a clock that went back: %v", err)
		}
	})
}

func onlineCPUs(t *testing.T) uint32 {
	n, err := readFile("/sys/devices/system/cpu", "online", parseCPUList)
	testhost.Must(t, err)
	return uint32(n)
}

func TestCgroupCapacity(t *testing.T) {
	for _, c := range []struct {
		parent, child map[string]string
		want          float64
	}{
		{nil, nil, float64(onlineCPUs(t))},
		{nil, map[string]string{"cpu.max": "5000 100000\n"}, 0.05},
		{map[string]string{"cpu.max": "5000 50000"}, map[string]string{"cpu.max": "20000 100000"}, 0.1},
		{map[string]string{"cpu.max": "90000 100000"}, map[string]string{"cpu.max": "20000 100000"}, 0.2},
		{map[string]string{"cpuset.cpus.effective": "0\n"}, nil, 1},
		{nil, map[string]string{"cpuset.cpus.effective": "1\n"}, 1},
		{nil, map[string]string{"cpuset.cpus.effective": "\n"}, float64(onlineCPUs(t))},
		{nil, map[string]string{"cpuset.cpus.effective": ""}, float64(onlineCPUs(t))},
	} {
		parent := newGroup(t, filepath.Join(t.TempDir(), "parent"))
		child := newGroup(t, filepath.Join(parent.path, "child"))
		for name, content := range c.parent {
			parent.write(t, name, content)
		}
		for name, content := range c.child {
			child.write(t, name, content)
		}
		if got, err := cpus(child.path); err != nil || got != c.want {
			t.Errorf("parent %q, child %q: %v CPUs, error %v; want %v", c.parent, c.child, got, err, c.want)
		}
	}
}

func TestCgroupErrorsNameFileAndValue(t *testing.T) {
	dir := t.TempDir()
	version1 := filepath.Join(dir, "version1")
	testhost.Must(t, os.Mkdir(version1, 0o755))
	with := func(name, file, content string) string {
		g := newGroup(t, filepath.Join(dir, name))
		g.used(t, 1)
		g.write(t, file, content)
		return g.path
	}
	piped := newGroup(t, filepath.Join(dir, "piped"))
	testhost.Must(t, unix.Mkfifo(filepath.Join(piped.path, "cpu.stat"), 0o600))
	for _, c := range []struct{ path, want string }{
		{filepath.Join(dir, "none"), "none: no such file or directory"},
		{version1, "version1: not a control group of version 2: no cgroup.controllers"},
		{newGroup(t, filepath.Join(dir, "bare")).path, "bare: cpu.stat: no such file"},
		{piped.path, "not a regular file"},
		{with("nothing", "cpu.stat", ""), "nothing: cpu.stat: no line usage_usec"},
		{with("other", "cpu.stat", "user_usec 4\n"), "other: cpu.stat: no line usage_usec"},
		{with("stat", "cpu.stat", "usage_usec -4\n"), `stat: cpu.stat: usage_usec is "-4"`},
		{with("max", "cpu.max", "much 100000\n"), `max: cpu.max: quota is "much"`},
		{with("one", "cpu.max", "100000\n"), `one: cpu.max: must be a quota and a period, is "100000"`},
		{with("period", "cpu.max", "max 0\n"), `period: cpu.max: period is "0"`},
		{with("set", "cpuset.cpus.effective", "0-x\n"), `set: cpuset.cpus.effective: list of CPUs has "0-x"`},
	} {
		_, err := NewCgroup(c.path).Read()
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %v, want %q", err, c.want)
		}
	}
}

func TestParsersOfCgroupFiles(t *testing.T) {
	for text, want := range map[string]float64{
		"max 100000": math.Inf(1), "100000 100000": 1, "250000 100000": 2.5, "1000 1000000": 0.001,
	} {
		if got, err := parseMax(text); err != nil || got != want {
			t.Errorf("cpu.max %q: %v, error %v; want %v", text, got, err, want)
		}
	}
	for text, want := range map[string]int{"": 0, "0": 1, "0-3": 4, "0-3,8": 5, "2,4-5,127": 4} {
		if got, err := parseCPUList(text); err != nil || got != want {
			t.Errorf("list %q: %v, error %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"3-1", "a", "1,", "1-", "-1", "70000"} {
		if got, err := parseCPUList(text); err == nil {
			t.Errorf("list %q: %v, want an error", text, got)
		}
	}
	for text, want := range map[string]uint64{
		"usage_usec 12": 12,
		"nr 3\nusage_usec 18446744073709551615\nx 1": math.MaxUint64,
	} {
		if got, err := parseUsage(text); err != nil || got != want {
			t.Errorf("cpu.stat %q: %v, error %v; want %v", text, got, err, want)
		}
	}
}

// A control group of the kernel has no load while it is empty, and some load when a process in it
// only computes.
func TestCgroupOfTheKernel(t *testing.T) {
	path := realGroup(t)
	c := NewCgroup(path)
	if _, err := c.Read(); !errors.Is(err, errFirst) {
		t.Fatalf("first read: %v", err)
	}
	time.Sleep(10 * time.Millisecond) // the interval may have any length
	if got, err := c.Read(); err != nil || got.Busy != 0 {
		t.Errorf("empty group: %+v, error %v", got, err)
	}
	folder, err := os.Open(path)
	testhost.Must(t, err)
	defer folder.Close()
	spin := exec.Command("sh", "-c", "while :; do :; done")
	spin.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(folder.Fd())}
	testhost.Must(t, spin.Start())
	defer func() {
		_ = spin.Process.Kill()
		_ = spin.Wait()
	}()
	// On a busy machine the process gets little CPU time, but always some.
	var got Load
	for deadline := time.Now().Add(limit); got.Busy == 0; {
		time.Sleep(100 * time.Millisecond)
		if got, err = c.Read(); err != nil {
			t.Fatal(err)
		}
		if got.Capacity < 1 || got.Capacity > onlineCPUs(t)*1000 {
			t.Errorf("with one thread that computes: %+v", got)
		}
		if time.Now().After(deadline) {
			t.Fatalf("still %+v", got)
		}
	}
	t.Logf("with one thread that computes: %+v", got)
}

// realGroup makes a control group, if this machine has version 2.
func realGroup(t testing.TB) string {
	t.Helper()
	path, err := os.MkdirTemp(testhost.NeedCgroup2(t), "segue-test-")
	if err != nil {
		t.Skipf("cannot make a control group: %v", err)
	}
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	})
	return path
}

func BenchmarkCgroup(b *testing.B) {
	c := NewCgroup(realGroup(b))
	for b.Loop() {
		if _, err := c.Read(); err != nil && !errors.Is(err, errFirst) {
			b.Fatal(err)
		}
	}
}
