// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/lab"
)

// logged waits until a process has logged a text since its log had a length.
func logged(t *testing.T, p *lab.Process, from int, text string) {
	t.Helper()
	eventually(t, func() error {
		if log := readLog(t, p)[from:]; !strings.Contains(log, text) {
			return fmt.Errorf("%s has not logged %q:\n%s", p, text, log)
		}
		return nil
	})
}

// TestNoFileDescriptors leaves the balancer's process no file descriptor. A reload is refused, the
// API waits, and no packet is lost. When there are descriptors again, all goes on.
func TestNoFileDescriptors(t *testing.T) {
	t.Parallel()
	l := shared(t, topology("http6-encap"))
	live, visitors := open(t, l, 50, l.Topology.Services...), startVisitors(t, l, 4, l.Topology.Services...)
	p := l.Process("lb1", "lb")
	pid, _ := p.PID()
	var before unix.Rlimit
	must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &before))
	none := unix.Rlimit{Cur: freeDescriptor(t, pid), Max: before.Max}
	must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &none, nil))
	start := len(readLog(t, p))

	must(t, p.Reload(t.Context()))
	logged(t, p, start, "reload failed; the earlier configuration stays in force")
	logged(t, p, start, "too many open files")
	undrain := exec.CommandContext(t.Context(), segue, "undrain", l.Topology.Services[0].Name+"/s1")
	var output sharedFile
	undrain.Stdout, undrain.Stderr = &output, &output
	must(t, l.Node("lb1").Start(undrain))
	logged(t, p, start, "http: Accept error")
	visitors.more(t, 20)
	must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &before, nil))
	if err := undrain.Wait(); err != nil {
		t.Errorf("%v: %s", err, &output)
	}
	reload(t, l, "lb1")
	visitors.more(t, 20)
	requireUnnoticed(t, l, live, visitors)
}

// freeDescriptor returns the lowest file descriptor that a process does not use.
func freeDescriptor(t *testing.T, pid int) (lowest uint64) {
	t.Helper()
	for {
		_, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", pid, lowest))
		if errors.Is(err, os.ErrNotExist) {
			return lowest
		}
		must(t, err)
		lowest++
	}
}

// TestFullDisk fills the disk with the state of a balancer. A drain is refused and changes nothing.
// A reload takes effect, and its generations are stored when there is room again. No packet is lost.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-encap")) // no other test has left generations
	live, visitors := open(t, l, 50, l.Topology.Services...), startVisitors(t, l, 4, l.Topology.Services...)
	n, p := l.Node("lb1"), l.Process("lb1", "lb")
	name, state := l.Topology.Services[0].Name, n.BalancerConfig().Node.State
	must(t, os.MkdirAll(state, 0o755))
	must(t, unix.Mount("none", state, "tmpfs", 0, "size=64k"))
	t.Cleanup(func() { must(t, unix.Unmount(state, unix.MNT_DETACH)) })
	filler := filepath.Join(state, "filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	start := len(readLog(t, p))

	out, err := n.Run(t.Context(), segue, "drain", name+"/s1")
	if err == nil || !strings.Contains(err.Error(), "no space left on device") {
		t.Errorf("drain: error %v, output %s", err, out)
	}
	if got := balancerStatus(t, n).Services[0].Servers[0].Condition; got == inspect.ServerDrained {
		t.Errorf("s1 is %s, although that is not stored", got)
	}
	cfg := n.BalancerConfig()
	cfg.Services[0].Servers[0].Weight = new(uint32(3)) // begins a generation
	must(t, n.WriteBalancerConfig(cfg))
	reload(t, l, "lb1")
	logged(t, p, start, "the generations of the services are not saved: a restart forgets the former ones")
	logged(t, p, start, "no space left on device")
	visitors.more(t, 20)

	must(t, os.Remove(filler))
	file := serversets.File(state, n.Instance())
	eventually(t, func() error {
		stored, err := serversets.Load(file)
		if err == nil && len(stored[name].Sets) != 2 {
			err = fmt.Errorf("%s has %d sets of %s", file, len(stored[name].Sets), name)
		}
		return err
	})
	if out := command(t, l, "lb1", segue, "drain", name+"/s1"); !strings.Contains(out, "is drained") {
		t.Error(out)
	}
	entries, err := os.ReadDir(state)
	must(t, err)
	for _, entry := range entries {
		if path := filepath.Join(state, entry.Name()); path != file && path != cfg.OverridesFile() {
			t.Errorf("%s is left behind", path)
		}
	}
	visitors.more(t, 20)
	requireUnnoticed(t, l, live, visitors)
}

// TestKernelRefusesTables starts a second balancer whose tables do not fit into the memory of its
// control group. The error names the limits, nothing is left behind, and the first balancer forwards
// all packets.
func TestKernelRefusesTables(t *testing.T) {
	t.Parallel()
	l := shared(t, topology("http6-encap"))
	group := memoryGroup(t, 150<<20)
	visitors := startVisitors(t, l, 4, l.Topology.Services...)
	instance := l.Node("lb1").Instance() + "-large"
	file := filepath.Join(t.TempDir(), "large.yaml")
	must(t, os.WriteFile(file, fmt.Appendf(nil, `
node: {instance: %s, interface: eth0, locator: "fd00:6c:99::/64", state: %s,
       limits: {flows: 60_000_000, hints: 1024, servers: 16}}
services: [{name: web, vip: "2001:db8:99::1", port: 80, protocol: tcp, servers: [{name: s1, locator: "fd00:5:99::/64"}]}]
`, instance, t.TempDir()), 0o600))

	start := func() (string, error) {
		return l.Node("lb1").Run(t.Context(), "sh", "-c", "echo $$ > "+group+" && exec "+segue+" lb -c "+file)
	}
	out, err := start()
	// If another thread of the process needs memory while the kernel makes the tables, the kernel may
	// kill the process. The directory of its pins then remains.
	for attempt := 0; attempt < 5 && err != nil && strings.Contains(err.Error(), "signal: killed"); attempt++ {
		must(t, os.RemoveAll(datapath.Dir(instance)))
		out, err = start()
	}
	want := "the kernel has no memory for the tables of node.limits (flows: 60000000, hints: 1024, servers: 16)"
	if err == nil || !strings.Contains(out, want) || !strings.Contains(out, "cannot allocate memory") {
		t.Errorf("error %v, want %q in:\n%s", err, want, out)
	}
	if _, err := os.Stat(datapath.Dir(instance)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins are left behind: %v", err)
	}
	if _, err := os.Stat(rundir.LockFile(instance)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the lock is left behind: %v", err)
	}
	visitors.more(t, 20)
	visitors.requireContent(t)
	requireNoDrops(t, l)
	visitors.stop()
}

// memoryGroup makes a control group with a limit of memory in bytes, which also counts the tables of
// BPF. It returns the file that takes the numbers of processes.
func memoryGroup(t *testing.T, limit int) (processes string) {
	t.Helper()
	name := fmt.Sprintf("segue-test-%d", os.Getpid())
	for _, kind := range []struct{ root, limit string }{
		{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}, // version 1
		{"/sys/fs/cgroup", "memory.max"},
	} {
		dir := filepath.Join(kind.root, name)
		if _, err := os.Stat(filepath.Join(kind.root, "cgroup.procs")); err != nil {
			continue
		}
		must(t, os.Mkdir(dir, 0o755))
		t.Cleanup(func() {
			eventually(t, func() error { return os.Remove(dir) }) // when the last process has left
		})
		if err := os.WriteFile(filepath.Join(dir, kind.limit), fmt.Append(nil, limit), 0); err != nil {
			t.Skipf("control groups cannot limit memory here: %v", err)
		}
		return filepath.Join(dir, "cgroup.procs")
	}
	t.Skip("there is no control group with the controller of memory")
	return ""
}

var memoryServers = flag.Int("memory.servers", 2000, "servers of the balancer in TestMemoryOfTheProcess")

// TestMemoryOfTheProcess runs a balancer with thousands of servers in 20 services. Reloads and scrapes
// of its eight series a server do not let the memory of its process grow without bounds.
func TestMemoryOfTheProcess(t *testing.T) {
	t.Parallel()
	l := shared(t, topology("http6-encap"))
	n := l.Node("client") // it runs no other instance
	instance := "memory-" + l.Name
	file, state := filepath.Join(t.TempDir(), "lb.yaml"), t.TempDir()
	text := fmt.Appendf(nil, `
node: {instance: %s, interface: eth0, locator: "fd00:6c:99::/64", state: %s, limits: {servers: %d}}
metrics: {listen: "[::1]:9288"}
services:
`, instance, state, *memoryServers)
	for s := range 20 {
		text = fmt.Appendf(text, "- {name: web%d, vip: \"2001:db8:99::%x\", port: 80, protocol: tcp, servers: [\n", s, s+1)
		for i := range *memoryServers / 20 {
			text = fmt.Appendf(text, "  {name: s%d, locator: \"fd00:5:%x:%x::/64\"},\n", i, s+1, i)
		}
		text = append(text, "  ]}\n"...)
	}
	must(t, os.WriteFile(file, text, 0o600))
	lb := exec.CommandContext(t.Context(), segue, "lb", "-c", file)
	var log sharedFile
	lb.Stdout, lb.Stderr = &log, &log
	must(t, n.Start(lb))
	t.Cleanup(func() {
		_ = lb.Process.Signal(unix.SIGTERM)
		_ = lb.Wait()
		mustCLI(t, segue, "lb", "detach", instance)
	})
	await := func(message string, times int) {
		t.Helper()
		eventually(t, func() error {
			if got := strings.Count(log.String(), message); got < times {
				return fmt.Errorf("%q was logged %d times, not %d: %s", message, got, times, log.String())
			}
			return nil
		})
	}
	await("msg=steering", 1)
	scrapes := &http.Client{Transport: &http.Transport{DialContext: n.Dial}, Timeout: patience}
	reloads := 0
	use := func(times int) uint64 {
		t.Helper()
		for range times {
			reloads++
			must(t, lb.Process.Signal(unix.SIGHUP))
			await("msg=reloaded", reloads)
			answer, err := scrapes.Get("http://[::1]:9288/metrics")
			must(t, err)
			size, err := io.Copy(io.Discard, answer.Body)
			must(t, errors.Join(err, answer.Body.Close()))
			if size < 100*int64(*memoryServers) {
				t.Fatalf("%d bytes of metrics: %s", size, answer.Status)
			}
		}
		return 1024 * procField(t, fmt.Sprintf("/proc/%d/status", lb.Process.Pid), "RssAnon:")
	}
	early := use(5)
	late := use(10)
	t.Logf("anonymous memory: %d MB after 5 reloads and scrapes, %d MB after 15", early>>20, late>>20)
	if late > early+early/2 {
		t.Errorf("memory grows from %d to %d bytes", early, late)
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", lb.Process.Pid))
	must(t, err)
	before := len(files)
	use(3)
	if files, err = os.ReadDir(fmt.Sprintf("/proc/%d/fd", lb.Process.Pid)); err != nil || len(files) > before+2 {
		t.Errorf("%v: %d file descriptors, and %d before three reloads", err, len(files), before)
	}
}
