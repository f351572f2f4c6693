// SPDX-License-Identifier: Apache-2.0

// Command guest is the first process of a guest of the command kernels. It loads the modules, runs
// the checks, and switches the guest off.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/test/kernels/console"
)

func main() {
	if os.Getpid() == 1 {
		boot()
	}
	check(context.Background())
	fmt.Println(console.End)
}

// boot runs this program again as a child, and then restarts the guest, which ends the emulator.
// The first process reaps all others, because it is the parent of those without one.
func boot() {
	if err := mount(); err != nil {
		fmt.Println(console.Failed+"mounts:", err)
	}
	cmd := exec.Command("/init")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = []string{"PATH=/bin", "HOME=/root"}
	if err := cmd.Start(); err != nil {
		fmt.Println(console.Failed+"/init:", err)
	} else {
		for pid := 0; pid != cmd.Process.Pid; {
			var err error
			if pid, err = unix.Wait4(-1, nil, 0, nil); err != nil && !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
	fmt.Println(unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)) // returns only after an error
}

// mount mounts the file systems, and opens the console.
func mount() error {
	for _, m := range []struct{ dir, kind string }{
		{"/dev", "devtmpfs"}, {"/proc", "proc"}, {"/sys", "sysfs"}, {"/run", "tmpfs"}, {"/tmp", "tmpfs"},
		{"/sys/fs/bpf", "bpf"}, {"/sys/fs/cgroup", "cgroup2"},
	} {
		if err := unix.Mount(m.kind, m.dir, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	fd, err := unix.Open("/dev/console", unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	for n := range 3 {
		if err := unix.Dup3(fd, n, 0); err != nil && fd != n {
			return err
		}
	}
	return nil
}

// check runs all checks. After a failed one, it goes on with the next one.
func check(ctx context.Context) {
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		fmt.Println("guest: Linux", unix.ByteSliceToString(name.Release[:]))
	}
	tell("the modules for virtual links", loadModules())
	tell("the agent's programs", runTest(ctx, "agent.test", "TestVerifierWork"))
	tell("one connection through each encapsulation and method", connect(ctx))
	for _, t := range []struct{ what, test string }{
		{"the balancer's programs: default, all features, dry run", "TestVerifierWork"},
		{"a balancer's program for each method", "TestEveryMethodLoads"},
	} {
		tell(t.what, runTest(ctx, "balancer.test", t.test))
	}
}

// tell prints whether a check passed.
func tell(what string, err error) {
	if err != nil {
		fmt.Printf("%s%s: %v\n", console.Failed, what, err)
		return
	}
	fmt.Println(console.Passed + what)
}

// loadModules loads the modules in the order of their files.
func loadModules() error {
	files, err := filepath.Glob("/modules/*.ko") // sorted
	if err != nil {
		return err
	}
	for _, name := range files {
		file, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(file.Fd()), "", 0)
		if err := errors.Join(err, file.Close()); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// runTest runs a test of a test program. A test that is skipped has failed.
func runTest(ctx context.Context, program, test string) error {
	cmd := exec.CommandContext(ctx, program, "-test.v", "-test.timeout=0", "-test.run=^"+test+"$")
	cmd.Dir = "/tmp"
	out, err := cmd.CombinedOutput()
	fmt.Printf("%s", out)
	if err == nil && !strings.Contains(string(out), "--- PASS: "+test) {
		err = errors.New("the test did not run")
	}
	return err
}
