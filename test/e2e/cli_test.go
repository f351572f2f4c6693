// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/lab"
)

// machine is the state that a lab could leave behind on this machine.
type machine struct {
	Paths, Mounts, Processes []string
	Sysctls                  map[string]string
}

// readMachine reads everything of the lab on the machine, and the machine's own network sysctls.
func readMachine(t *testing.T) machine {
	t.Helper()
	m := machine{Sysctls: map[string]string{}}
	for _, pattern := range []string{
		"/run/netns/segue-" + labName + "-*",
		"/sys/fs/bpf/segue/*" + labName + "-*",
		"/run/segue/*" + labName + "*",
		"/run/segue/lab/" + labName,
	} {
		paths, err := filepath.Glob(pattern)
		must(t, err)
		m.Paths = append(m.Paths, paths...)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	must(t, err)
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, labName) || strings.Contains(line, " /sys/fs/bpf ") {
			m.Mounts = append(m.Mounts, line)
		}
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, path := range commands {
		text, _ := os.ReadFile(path) // the process may have ended
		if strings.Contains(string(text), "/run/segue/lab/"+labName) || strings.HasPrefix(string(text), segue) {
			m.Processes = append(m.Processes, strings.ReplaceAll(string(text), "\x00", " "))
		}
	}
	must(t, filepath.WalkDir("/proc/sys/net", func(path string, entry fs.DirEntry, err error) error {
		// nf_conntrack_count changes by itself, and some files can only be written.
		if err != nil || entry.IsDir() || entry.Name() == "nf_conntrack_count" {
			return err
		}
		if value, err := os.ReadFile(path); err == nil {
			m.Sysctls[path] = string(value)
		}
		return nil
	}))
	return m
}

// requireUnchanged fails the test unless the machine is unchanged.
func requireUnchanged(t *testing.T, before machine) {
	t.Helper()
	if diff := cmp.Diff(before, readMachine(t)); diff != "" {
		t.Errorf("the machine (-before +after):\n%s", diff)
	}
}

// cli runs a program and returns its output.
func cli(t *testing.T, program string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(interrupted, patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, args...).CombinedOutput()
	return string(out), err
}

func mustCLI(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := cli(t, program, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
	}
	return out
}

// cleanUp removes the lab at the end of a test, even if the test fails.
func cleanUp(t *testing.T) {
	t.Cleanup(func() {
		if err := lab.Down(labName); err != nil && !errors.Is(err, lab.ErrNotUp) {
			t.Error(err)
		}
	})
}

func TestLabCommands(t *testing.T) {
	needRoot(t)
	before := readMachine(t)
	cleanUp(t)
	name := []string{"--name", labName}
	mustCLI(t, laboratory, append([]string{"lab", "up"}, name...)...)
	if out, err := cli(t, laboratory, append([]string{"lab", "up"}, name...)...); err == nil || !strings.Contains(out, "is already up") {
		t.Errorf("a second lab of the name: %v: %s", err, out)
	}
	var status lab.Status
	must(t, json.Unmarshal([]byte(mustCLI(t, laboratory, append([]string{"lab", "status", "--json"}, name...)...)), &status))
	if status.Running != status.Processes || status.Running == 0 {
		t.Errorf("%d of %d processes are running", status.Running, status.Processes)
	}
	for _, service := range status.Services {
		if service.Protocol != "tcp" {
			continue
		}
		out := mustCLI(t, laboratory, append(append([]string{"lab", "exec"}, name...),
			"client", "--", "curl", "-sS", "--fail", "--max-time", "30", "http://"+service.Address+"/")...)
		if server := strings.TrimSpace(out); len(server) != 2 || server[0] != 's' {
			t.Errorf("curl of %s says %q, not a server's name", service.Name, out)
		}
	}
	must(t, json.Unmarshal([]byte(mustCLI(t, laboratory, append([]string{"lab", "status", "--json"}, name...)...)), &status))
	taken := map[string]uint64{}
	for _, o := range status.Offers {
		passedOn := o.Offers["refused"] + o.Offers["refused_down"] + o.Offers["returned"]
		taken[o.Service] += o.Offered - passedOn
	}
	if diff := cmp.Diff(map[string]uint64{"hunt6-insert": 1, "hunt6-encap": 1, "hunt4-encap": 1}, taken); diff != "" {
		t.Errorf("connections that servers took, of one for each service (-want +got):\n%s", diff)
	}
	if out := mustCLI(t, laboratory, append([]string{"lab", "status"}, name...)...); !strings.Contains(out, "hunt4-encap      s4      least") {
		t.Errorf("for people the status does not show what s4 did:\n%s", out)
	}
	out, err := cli(t, laboratory, append(append([]string{"lab", "exec"}, name...), "client", "sh", "-c", "exit 7")...)
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != 7 {
		t.Errorf("a command's exit code 7 becomes %v: %s", err, out)
	}
	checkLabImpair(t)
	checkLabRestart(t)
	startByHand(t, "client")
	mustCLI(t, laboratory, append([]string{"lab", "down"}, name...)...)
	for _, command := range []string{"down", "status"} {
		if out, err := onLab(t, command); err == nil || !strings.Contains(out, "is not up") {
			t.Errorf("%s of a lab that is down: %v: %s", command, err, out)
		}
	}
	mustCLI(t, laboratory, append([]string{"lab", "down", "--if-exists"}, name...)...)
	requireUnchanged(t, before)
}

// onLab runs a subcommand of segue-lab lab on the test's lab and returns its output.
func onLab(t *testing.T, command string, args ...string) (string, error) {
	t.Helper()
	return cli(t, laboratory, append([]string{"lab", command, "--name", labName}, args...)...)
}

// checkLabImpair adds an impairment that lasts until it is removed.
func checkLabImpair(t *testing.T) {
	for _, test := range []struct {
		args    string
		refused bool
		output  string
	}{
		{"--drop 5% s1", false, ": 5% dropped to and from s1."},
		{"s1", true, "missing a share"},
		{"", true, "missing a share"},
		{"--drop 0% s1", true, "all shares are 0%"},
		{"--drop 5% s9", true, "its nodes are fabric, edge, client, lb1, lb2, s1 to s4"},
	} {
		out, err := onLab(t, "impair", strings.Fields(test.args)...)
		if (err != nil) != test.refused || !strings.Contains(out, test.output) {
			t.Errorf("lab impair %s: %v: %s", test.args, err, out)
		}
		out, err = onLab(t, "status")
		if err != nil || !strings.Contains(out, "Impaired: 5% dropped to and from s1") {
			t.Errorf("status after lab impair %s: %v: %s", test.args, err, out)
		}
	}
	out, err := onLab(t, "impair", "--off")
	if err != nil || !strings.Contains(out, "no impairment") {
		t.Errorf("lab impair --off: %v: %s", err, out)
	}
	if out, err := onLab(t, "status"); err != nil || strings.Contains(out, "Impaired") {
		t.Errorf("status after lab impair --off: %v: %s", err, out)
	}
}

// checkLabRestart restarts an agent by SIGTERM, and a balancer by SIGKILL.
func checkLabRestart(t *testing.T) {
	l, err := lab.Open(labName, executables(segue))
	must(t, err)
	for _, test := range []struct {
		args          string
		node, process string
		asked         bool
	}{
		{"s1 agent", "s1", "agent", true},
		{"--kill lb1", "lb1", "lb", false},
	} {
		p, other := l.Process(test.node, test.process), l.Process("s1", "nginx")
		before, _ := p.PID()
		otherBefore, _ := other.PID()
		said := len(readLog(t, p))
		out, err := onLab(t, "restart", strings.Fields(test.args)...)
		after, alive := p.PID()
		want := fmt.Sprintf("%s (%d)", test.process, after)
		if err != nil || !alive || after == before || !strings.Contains(out, want) {
			t.Errorf("lab restart %s: process %d, then %d: %v: %s", test.args, before, after,
				err, out)
		}
		if pid, _ := other.PID(); pid != otherBefore {
			t.Errorf("lab restart %s restarts nginx of s1", test.args)
		}
		text := readLog(t, p)[said:]
		if strings.Contains(text, "terminated signal received") != test.asked {
			t.Errorf("lab restart %s: asked to stop: want %t in\n%s", test.args, test.asked, text)
		}
	}
	if out, err := onLab(t, "restart", "fabric"); err == nil ||
		!strings.Contains(out, "has no processes to restart; these nodes have some: lb1, lb2, s1 to s4") {
		t.Errorf("lab restart fabric: %v: %s", err, out)
	}
}

// startByHand starts an agent on a node without the lab's knowledge, and leaves it running.
func startByHand(t *testing.T, node string) {
	file := filepath.Join(t.TempDir(), "agent.yaml")
	text := fmt.Sprintf(`
node: {instance: hand-%s-agent, interface: eth0, locator: "fd00:5:0:ff::/64"}
services: [{name: web, vip: "2001:db8:99::1", port: 80, protocol: tcp}]
`, labName)
	must(t, os.WriteFile(file, []byte(text), 0o644))
	cmd := exec.Command(laboratory, "lab", "exec", "--name", labName, node, "--",
		segue, "agent", "-c", file)
	log, err := cmd.StderrPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // in case the removal of the lab has not ended it
		_ = cmd.Wait()
	})
	said := ""
	lines := bufio.NewScanner(log)
	for !strings.Contains(said, "msg=receiving") {
		if !lines.Scan() {
			t.Fatalf("the agent on %s ended: %s", node, said)
		}
		said += lines.Text() + "\n"
	}
}

// TestDemoIsInterrupted interrupts the demo in each of its phases. Its lab is small, because it is
// built nine times.
func TestDemoIsInterrupted(t *testing.T) {
	needRoot(t)
	before := readMachine(t)
	cleanUp(t)
	file := filepath.Join(t.TempDir(), "topology.yaml")
	must(t, os.WriteFile(file, []byte("balancers: 1\nservers: 2\nservices:\n"+
		"  - {name: web, vip: 2001:db8:80::1, port: 80, protocol: tcp, encapsulation: srv6-insert}\n"+
		"  - {name: echo, vip: 203.0.113.2, port: 9000, protocol: udp, encapsulation: gre}\n"), 0o644))
	for _, phase := range []string{"Building", "Starting", "Sending", "Removing"} {
		signals := []unix.Signal{unix.SIGINT, unix.SIGKILL}
		if phase == "Sending" {
			signals = append(signals, unix.SIGHUP) // handled like SIGINT
		}
		for _, signal := range signals {
			t.Run(phase+" "+unix.SignalName(signal), func(t *testing.T) {
				cmd := exec.Command(laboratory, "lab", "demo", "--name", labName, "-f", file)
				// A process group of its own, so that it gets no signals of a terminal.
				cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
				out, err := cmd.StdoutPipe()
				must(t, err)
				must(t, cmd.Start())
				lines := bufio.NewScanner(out)
				for lines.Scan() && !strings.HasPrefix(lines.Text(), phase) {
				}
				must(t, cmd.Process.Signal(signal))
				for lines.Scan() {
				}
				err = cmd.Wait()
				if signal == unix.SIGKILL {
					mustCLI(t, laboratory, "lab", "down", "--name", labName)
				} else if err == nil && phase != "Removing" {
					t.Error("an interrupted demo says that it succeeded")
				}
				requireUnchanged(t, before)
			})
		}
	}
}

// TestPrivatePins runs a balancer where it sees no BPF file system, as ip netns exec does.
func TestPrivatePins(t *testing.T) {
	needRoot(t)
	const warning = "/sys/fs/bpf is private to this process"
	for _, c := range []struct {
		command []string
		warned  bool
	}{
		{[]string{"unshare", "-m", "sh", "-c", `mount -t tmpfs tmpfs /sys/fs/bpf && exec "$0" "$@"`, segue}, true},
		{[]string{segue}, false},
	} {
		args := append(c.command[1:], "lb", "-c", filepath.Join(t.TempDir(), "missing.yaml"))
		out, _ := exec.CommandContext(t.Context(), c.command[0], args...).CombinedOutput() // there is no such file
		if got := strings.Contains(string(out), warning); got != c.warned {
			t.Errorf("%v: warned %v, want %v:\n%s", c.command, got, c.warned, out)
		}
	}
}

// TestPrivateDataPath stops an agent whose data path ends with the process.
func TestPrivateDataPath(t *testing.T) {
	t.Parallel()
	needRoot(t)
	instance := fmt.Sprintf("test-%d-private", os.Getpid())
	t.Cleanup(func() { _ = os.Remove(rundir.LockFile(instance)) })
	file := filepath.Join(t.TempDir(), "agent.yaml")
	must(t, os.WriteFile(file, fmt.Appendf(nil, `
node: {instance: %s, interface: eth0, locator: "fd00:5:0:1::/64"}
services: [{name: web, vip: "2001:db8:80::1", port: 80, protocol: tcp}]
`, instance), 0o600))
	const script = `mount -t tmpfs tmpfs /sys/fs/bpf && ip link add eth0 type veth peer name port &&
		ip link set eth0 up && ip link set port up && exec "$0" agent -c "$1"`
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "-m", "-n", "sh", "-c", script, segue, file)
	log, err := cmd.StderrPipe()
	must(t, err)
	must(t, cmd.Start())
	said := ""
	for lines := bufio.NewScanner(log); lines.Scan(); {
		said += lines.Text() + "\n"
		switch {
		case strings.Contains(lines.Text(), "msg=receiving"):
			must(t, cmd.Process.Signal(unix.SIGHUP)) // the reload shows that the start has ended
		case strings.Contains(lines.Text(), "msg=reloaded"):
			must(t, cmd.Process.Signal(unix.SIGTERM))
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("the agent did not receive, reload and stop within a minute: %v:\n%s", err, said)
	}
	if want := "stopping; the data path ends with the process"; !strings.Contains(said, want) ||
		strings.Contains(said, "remove=") {
		t.Errorf("the log does not say %q, or names a command that removes the data path:\n%s", want, said)
	}
}
