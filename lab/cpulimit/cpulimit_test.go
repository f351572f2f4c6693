// SPDX-License-Identifier: Apache-2.0

package cpulimit_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab/cpulimit"
)

// TestFind finds the hierarchy in the mount tables of several machines.
func TestFind(t *testing.T) {
	const v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
	for _, test := range []struct{ name, mounts, root string }{
		{"version 2", "proc /proc proc rw 0 0\n" + v2, "/sys/fs/cgroup (2)"},
		{"version 1", "cgroup /cg/mem cgroup rw,memory 0 0\n" +
			"cgroup /cg/c cgroup rw,cpu,cpuacct 0 0\n", "/cg/c (1)"},
		{"both", "cgroup2 /cg/u cgroup2 rw 0 0\ncgroup /cg/cpu cgroup rw,cpu 0 0\n", "/cg/cpu (1)"},
		{"controllers with similar names", "cgroup /cg/a cgroup rw,cpuacct 0 0\n" +
			"cgroup /cg/s cgroup rw,cpuset 0 0\n" + v2, "/sys/fs/cgroup (2)"},
		{"none", "proc /proc proc rw 0 0\n\n", ""},
	} {
		root, err := cpulimit.FindIn(test.mounts)
		if root != test.root || errors.Is(err, cpulimit.ErrNone) != (root == "") {
			t.Errorf("%s: %q, %v, want %q", test.name, root, err, test.root)
		}
	}
}

// newGroup makes a group for the duration of a test. It returns a function that makes a command,
// which runs a script with an argument in the group.
func newGroup(t *testing.T, cpus float64) func(script, argument string) *exec.Cmd {
	t.Helper()
	testhost.NeedCPULimits(t)
	h, err := cpulimit.Find()
	if err != nil {
		t.Fatal(err)
	}
	set := fmt.Sprintf("segue-test-%d", os.Getpid())
	t.Cleanup(func() { // the second Remove finds no set, which is no error
		if err := errors.Join(h.Remove(set), h.Remove(set)); err != nil {
			t.Error(err)
		}
	})
	if err := h.Create(set, "a", cpus); err != nil {
		t.Fatal(err)
	}
	return func(script, argument string) *exec.Cmd {
		command := h.Command(set, "a", []string{"/bin/sh", "-c", script, "sh", argument})
		return exec.Command(command[0], command[1:]...)
	}
}

func cpuTime(cmd *exec.Cmd) time.Duration {
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
}

// TestLimit limits two processes, which compute, to a tenth of a CPU together.
func TestLimit(t *testing.T) {
	run := newGroup(t, 0.1)
	const script = `count() { i=0; while [ $i -lt "$1" ]; do i=$((i+1)); done; }
count "$1" & count "$1"; wait`
	cmd := run(script, "100000")
	begin := time.Now()
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	took := time.Since(begin)
	used := cpuTime(cmd)
	t.Logf("the group used %v of CPU time in %v", used, took)
	if used < 50*time.Millisecond {
		t.Fatalf("the group used %v of CPU time, too little to judge", used)
	}
	// The kernel lets a group overdraw its limit by a few milliseconds.
	if least := 8 * used; took < least {
		t.Errorf("the group used %v of CPU time in %v, want at least %v", used, took, least)
	}
}

// TestBusyMachine has a group compete with several programs for each CPU. The group gets the CPU
// time of its limit, which is a multiple of what a program gets.
func TestBusyMachine(t *testing.T) {
	run := newGroup(t, 0.5)
	var others []*exec.Cmd
	for range 4 * runtime.NumCPU() {
		cmd := exec.Command("/bin/sh", "-c", "while :; do :; done")
		// The kernel may schedule the programs of a session as one (autogroup, sched(7)).
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		others = append(others, cmd)
	}
	cmd := run(`i=0; while [ $i -lt "$1" ]; do i=$((i+1)); done`, "400000")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	mean := time.Duration(0)
	for _, other := range others {
		other.Process.Kill()
		other.Wait()
		mean += cpuTime(other) / time.Duration(len(others))
	}
	t.Logf("the group used %v of CPU time, others %v each", cpuTime(cmd), mean)
	if cpuTime(cmd) < 3*mean/2 {
		t.Errorf("the group used %v of CPU time while others used %v each", cpuTime(cmd), mean)
	}
}

// TestVersion2 writes to files with the names that version 2 has (cpu.max in the kernel's
// documentation, cgroup-v2.rst). A machine with version 1 has no real ones.
func TestVersion2(t *testing.T) {
	root := t.TempDir()
	want := map[string]string{
		"cgroup.subtree_control":     "+cpu",
		"set/cgroup.subtree_control": "+cpu",
		"set/cpu.weight":             "10000",
		"set/a/cpu.max":              "2500 10000", // microseconds
	}
	if err := os.MkdirAll(filepath.Join(root, "set", "a"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name := range want {
		if err := os.WriteFile(filepath.Join(root, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := cpulimit.Version2(root).Create("set", "a", 0.25); err != nil {
		t.Fatal(err)
	}
	for name, content := range want {
		if got, err := os.ReadFile(filepath.Join(root, name)); string(got) != content {
			t.Errorf("%s: %q, %v, want %q", name, got, err, content)
		}
	}
}
