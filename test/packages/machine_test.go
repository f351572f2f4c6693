// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

const patience = testhost.Patience

// rootsDir has the Debian roots that other test runs of this checkout have made.
const rootsDir = "../../.tools/roots"

// making lets tests make one root at a time.
var making sync.Mutex

// debianRoot returns a bare Debian root with systemd, which must not be changed. It skips the test
// if it cannot make one.
func debianRoot(t *testing.T, suite string) string { return debianRootWith(t, suite, suite) }

// debianRootWith returns a Debian root with systemd and further packages, whose name is that of this
// set of packages.
func debianRootWith(t *testing.T, suite, name string, packages ...string) string {
	t.Helper()
	testhost.NeedCommand(t, "debootstrap", "debootstrap")
	making.Lock()
	defer making.Unlock()
	root, err := filepath.Abs(filepath.Join(rootsDir, name))
	must(t, err)
	if _, err := os.Stat(root); err == nil {
		return root
	}
	must(t, os.MkdirAll(filepath.Dir(root), 0o755))
	partial, err := os.MkdirTemp(filepath.Dir(root), name+".new")
	must(t, err)
	defer os.RemoveAll(partial)
	args := []string{"--variant=minbase", "--include=" + strings.Join(append(packages, "dbus", "systemd", "systemd-sysv"), ","), suite, partial}
	if mirror := aptMirror(); mirror != "" {
		args = append(args, mirror)
	}
	if out, err := exec.CommandContext(t.Context(), "debootstrap", args...).CombinedOutput(); err != nil {
		t.Skipf("debootstrap cannot make a root of %s here: %v\n%s", suite, err, lastLines(out, 5))
	}
	must(t, os.Chmod(partial, 0o755))
	must(t, os.Rename(partial, root))
	return root
}

// aptMirror returns the mirror of Debian that this machine uses. It is empty if the machine runs
// another distribution: debootstrap then uses its default.
func aptMirror() string {
	release, _ := os.ReadFile("/etc/os-release")
	if !strings.Contains(string(release), "\nID=debian\n") {
		return ""
	}
	sources, _ := os.ReadFile("/etc/apt/sources.list.d/debian.sources")
	for line := range strings.Lines(string(sources)) {
		if mirror, found := strings.CutPrefix(line, "URIs: "); found {
			return strings.Fields(mirror)[0]
		}
	}
	list, _ := os.ReadFile("/etc/apt/sources.list")
	for line := range strings.Lines(string(list)) {
		fields := strings.Fields(line)
		if i := slices.IndexFunc(fields, func(f string) bool { return strings.HasPrefix(f, "http") }); i > 0 && fields[0] == "deb" {
			return fields[i]
		}
	}
	return ""
}

// machine is a Debian root in which systemd runs, in a network namespace of its own.
type machine struct {
	name string
	root string // the root's path on this machine
	net  *testhost.Namespace
	log  *bytes.Buffer
	// Of the present boot: the control group, the process ID of systemd, and its end.
	group string
	init  int
	ended chan error
}

// bootMachine boots a machine whose files are those of a root at first. It skips the test if systemd
// does not start here.
func bootMachine(t *testing.T, name, root string) *machine {
	t.Helper()
	testhost.NeedBPF(t)
	m := &machine{name: name, root: overlay(t, root), net: testhost.NewNamespace(t), log: new(bytes.Buffer)}
	must(t, os.WriteFile(filepath.Join(m.root, "etc/hostname"), []byte(name+"\n"), 0o644))
	// Debian's timers would change files, such as by a copy of dpkg's files at midnight.
	must(t, os.Symlink("/dev/null", filepath.Join(m.root, "etc/systemd/system/timers.target")))
	m.boot(t)
	t.Cleanup(func() {
		if t.Failed() {
			out, err := m.run("journalctl", "--quiet", "--merge", "--output=cat", "--unit=segue-*")
			t.Logf("the journal of %s (%v):\n%s", name, err, out)
		}
	})
	return m
}

// overlay mounts a root for the duration of a test. Changes go to memory, and the root stays as it is.
func overlay(t *testing.T, root string) (merged string) {
	t.Helper()
	dir := t.TempDir()
	mount := func(kind, target, options string) {
		t.Helper()
		must(t, unix.Mount(kind, target, kind, 0, options))
		t.Cleanup(func() { must(t, unix.Unmount(target, unix.MNT_DETACH)) })
	}
	mount("tmpfs", dir, "mode=0755")
	upper, work, merged := filepath.Join(dir, "upper"), filepath.Join(dir, "work"), filepath.Join(dir, "root")
	for _, folder := range []string{upper, work, merged} {
		must(t, os.Mkdir(folder, 0o755))
	}
	mount("overlay", merged, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", root, upper, work))
	return merged
}

// boot boots the machine, also again after powerOff. Its files and its network have stayed.
func (m *machine) boot(t *testing.T) {
	t.Helper()
	m.group = m.ownGroup(t)
	script, err := filepath.Abs("../../docs/examples/fleet/boot.sh")
	must(t, err)
	// The shell joins the control group, which is then the root of unshare's group namespace.
	cmd := exec.Command("sh", "-c", `echo $$ >"$2/cgroup.procs" &&
		exec unshare --mount --uts --ipc --cgroup --pid --fork --kill-child sh "$0" "$1"`, script, m.root, m.group)
	cmd.Stdout, cmd.Stderr = m.log, m.log
	must(t, m.net.Do(cmd.Start))
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // takes all processes of the PID namespace with it
		<-ended
	})
	m.init, m.ended = childOf(t, cmd.Process.Pid, ended, m.log), ended
	eventually(t, func() error {
		out, err := m.run("systemctl", "is-system-running")
		if state := strings.TrimSpace(out); state != "running" && state != "degraded" {
			return fmt.Errorf("%s: systemd is %q: %w", m.name, state, err)
		}
		return nil
	})
}

// powerOff shuts the machine down in an orderly way, and waits for the end.
func (m *machine) powerOff(t *testing.T) {
	t.Helper()
	m.must(t, "systemctl", "--no-block", "poweroff")
	select {
	case err := <-m.ended:
		m.ended <- err
	case <-time.After(2 * patience):
		t.Fatalf("%s does not shut down:\n%s", m.name, m.log)
	}
	eventually(t, func() error { return removeGroups(m.group) })
}

// ownGroup makes a control group for the machine. It skips the test if it may not.
func (m *machine) ownGroup(t *testing.T) string {
	t.Helper()
	group := filepath.Join(testhost.NeedCgroup2(t), fmt.Sprintf("segue-packages-%d-%s", os.Getpid(), m.name))
	if err := os.Mkdir(group, 0o755); err != nil {
		t.Skipf("needs a control group for systemd: %v", err)
	}
	t.Cleanup(func() {
		eventually(t, func() error { // the kernel removes ended processes from groups later
			err := removeGroups(group)
			return err
		})
	})
	return group
}

// removeGroups removes a control group with those inside it.
func removeGroups(group string) error {
	var groups []string
	err := filepath.WalkDir(group, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			groups = append(groups, path)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, group := range slices.Backward(groups) {
		if problem := os.Remove(group); problem != nil && err == nil {
			err = problem
		}
	}
	return err
}

// childOf waits for the only child of a process. It skips the test if the process ends before.
func childOf(t *testing.T, pid int, ended chan error, log *bytes.Buffer) (child int) {
	t.Helper()
	eventually(t, func() error {
		select {
		case err := <-ended:
			ended <- err
			t.Skipf("systemd does not start in namespaces here: %v\n%s", err, log)
		default:
		}
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		if err == nil {
			child, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	})
	return child
}

// command returns a command in the machine.
func (m *machine) command(ctx context.Context, args ...string) *exec.Cmd {
	enter := []string{"--target", strconv.Itoa(m.init), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup",
		"--root", "--wd=/", "--"}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"}
	return cmd
}

func (m *machine) run(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := m.command(ctx, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %s: %w\n%s", m.name, strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// must runs a command that must succeed, and returns its output.
func (m *machine) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := m.run(args...)
	testhost.Must(t, err)
	return out
}

// write writes a file of the machine.
func (m *machine) write(t *testing.T, path, content string, mode fs.FileMode) {
	t.Helper()
	path = filepath.Join(m.root, path)
	must(t, os.WriteFile(path, []byte(content), mode))
	must(t, os.Chmod(path, mode))
}

// ip runs ip(8), of the test's machine, in the network namespace of the machine.
func ip(t *testing.T, n *testhost.Namespace, args ...string) {
	t.Helper()
	must(t, n.Do(func() error {
		out, err := exec.CommandContext(t.Context(), "ip", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}))
}

// files describes all files of the machine's root, except for logs, caches, and what dpkg and
// systemd keep about every package.
func (m *machine) files(t *testing.T) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(m.root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, m.root)
		for _, changes := range []string{"/var/log/", "/var/cache/", "/var/lib/dpkg/", "/var/tmp/", "/tmp/",
			"/var/lib/systemd/", "/var/lib/private", "/root/"} {
			if strings.HasPrefix(name, changes) && !strings.Contains(name, "segue") {
				return nil
			}
		}
		if strings.HasPrefix(name, "/etc/") && strings.HasSuffix(name, "-") {
			return nil // the copies of /etc/passwd and others before a change
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		stat := info.Sys().(*syscall.Stat_t)
		found = append(found, fmt.Sprintf("%s %s %d:%d", name, info.Mode(), stat.Uid, stat.Gid))
		return nil
	})
	must(t, err)
	return found
}

func run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Helpers of all tests.
var must, eventually = testhost.Must, testhost.Eventually

func lastLines(text []byte, n int) string {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
