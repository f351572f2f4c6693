// SPDX-License-Identifier: Apache-2.0

// Package testhost gives tests what they need of the host: network namespaces of their own, and
// files on overlayfs. If a machine lacks something that a test needs, as containers often do, it
// skips the test and says why. Most functions NeedX look for it only once per process.
package testhost

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/lab/cpulimit"
)

// NeedNamespaces skips a test if the user may not make network namespaces or set their sysctls.
func NeedNamespaces(t testing.TB) {
	t.Helper()
	skipUnless(t, namespaces)
	skipUnless(t, sysctls)
}

// NeedBPF skips a test if the user may not load BPF programs or pin them in /sys/fs/bpf.
func NeedBPF(t testing.TB) {
	t.Helper()
	skipUnless(t, programs)
	skipUnless(t, pins)
}

// NeedAgent skips a test if the data path of an agent cannot be loaded. It needs what NeedBPF
// checks, and a kernel with type information (BTF).
func NeedAgent(t testing.TB) {
	t.Helper()
	NeedBPF(t)
	skipUnless(t, kernelTypes)
}

// NeedTUN skips a test if the user may not make TUN interfaces.
func NeedTUN(t testing.TB) {
	t.Helper()
	skipUnless(t, tun)
}

// NeedCgroup2 returns the folder at which control groups, version 2, are mounted. It is the root
// group, to which programs can be attached. NeedCgroup2 skips the test if there is no such folder.
func NeedCgroup2(t testing.TB) string {
	t.Helper()
	skipUnless(t, func() error { _, err := cgroup2(); return err })
	root, _ := cgroup2()
	return root
}

// NeedCPULimits skips a test if the user may not limit the CPU time of processes by control groups.
func NeedCPULimits(t testing.TB) {
	t.Helper()
	skipUnless(t, cpuLimits)
}

// NeedCommand skips a test if a command is not installed. packageName is the Debian package that
// contains the command.
func NeedCommand(t testing.TB, command, packageName string) {
	t.Helper()
	if _, err := exec.LookPath(command); err != nil {
		t.Skipf("needs the package %s: %v", packageName, err)
	}
}

// NeedSwitch skips a test if the software switch is not in PATH. No package of Debian contains it.
func NeedSwitch(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("simple_switch_grpc"); err != nil {
		t.Skipf("needs the software switch bmv2 (docs/understand/p4.md): %v", err)
	}
}

// skipUnless skips a test if can returns an error, which is the reason.
func skipUnless(t testing.TB, can func() error) {
	t.Helper()
	if err := can(); err != nil {
		t.Skip(err)
	}
}

var errNoRoot = errors.New("needs root")

// Each of the following variables is a function that finds out once whether the user can do
// something. Its error is the reason why not.

var namespaces = sync.OnceValue(func() error {
	if os.Geteuid() != 0 {
		return errNoRoot
	}
	n, err := netdev.NewNamespace()
	if err != nil {
		return fmt.Errorf("needs network namespaces: %w", err)
	}
	return n.Close()
})

var sysctls = sync.OnceValue(func() error {
	const sysctl = "/proc/sys/net/ipv4/ip_forward"
	if err := unix.Access(sysctl, unix.W_OK); err != nil {
		return fmt.Errorf("needs to set sysctls: %s: %w", sysctl, err)
	}
	return nil
})

var programs = sync.OnceValue(func() error {
	if os.Geteuid() != 0 {
		return errNoRoot
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if errors.Is(err, os.ErrPermission) {
		err = unix.EPERM // without the text of package ebpf, which only guesses the cause
	}
	if err != nil {
		return fmt.Errorf("needs to load BPF programs: %w", err)
	}
	return p.Close()
})

// pins finds out whether the BPF file system is mounted, or could be mounted. For this, it mounts
// one in another place, because tests check that labs do not leave /sys/fs/bpf mounted.
var pins = sync.OnceValue(func() error {
	const root = "/sys/fs/bpf"
	var stat unix.Statfs_t
	if err := unix.Statfs(root, &stat); err != nil {
		return fmt.Errorf("needs the BPF file system: %s: %w", root, err)
	}
	if stat.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	dir, err := os.MkdirTemp("", "segue-bpf")
	if err != nil {
		return err
	}
	defer os.Remove(dir)
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		return fmt.Errorf("needs to mount the BPF file system: %w", err)
	}
	return unix.Unmount(dir, 0)
})

var kernelTypes = sync.OnceValue(func() error {
	if _, err := btf.LoadKernelSpec(); err != nil {
		return fmt.Errorf("needs a kernel that describes its types: %w", err)
	}
	return nil
})

var tun = sync.OnceValue(func() error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("needs TUN interfaces: /dev/net/tun: %w", err)
	}
	return unix.Close(fd)
})

// cpuLimits makes a control group with a CPU limit, and removes it.
var cpuLimits = sync.OnceValue(func() error {
	if os.Geteuid() != 0 {
		return errNoRoot
	}
	h, err := cpulimit.Find()
	if err == nil {
		set := fmt.Sprintf("segue-needs-%d", os.Getpid())
		err = errors.Join(h.Create(set, "a", 1), h.Remove(set))
	}
	if err != nil {
		return fmt.Errorf("needs control groups for CPU time: %w", err)
	}
	return nil
})

// cgroup2 returns the first mount point of control groups, version 2, as the agent finds it.
var cgroup2 = sync.OnceValues(func() (string, error) {
	mounts, err := os.Open("/proc/self/mounts")
	if err != nil {
		return "", fmt.Errorf("needs control groups version 2: %w", err)
	}
	defer mounts.Close()
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 3 || fields[2] != "cgroup2" {
			continue
		}
		var stat unix.Statfs_t
		if err := unix.Statfs(fields[1], &stat); err != nil || stat.Type != unix.CGROUP2_SUPER_MAGIC {
			return "", fmt.Errorf("needs control groups version 2: %s is hidden by another mount", fields[1])
		}
		return fields[1], nil
	}
	return "", errors.New("needs control groups version 2, and none are mounted")
})
