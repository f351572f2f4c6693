// SPDX-License-Identifier: Apache-2.0

// Package cpulimit limits the CPU time of processes by control groups. It uses version 1 where its
// controller cpu is mounted, and otherwise version 2.
package cpulimit

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// period is the period of CFS bandwidth control: in each period, the kernel lets a group run until
// it has used its quota. The shorter the period, the more a limited group behaves like one on a
// slow CPU. In a long period, the group would run at full speed until its quota is used, and then
// stand still until the period ends.
const period = 10 * time.Millisecond

// A limit is a number of CPUs from Min to Max. Min is the kernel's smallest quota, 1 ms, divided by
// the period.
const (
	Min = 0.1
	Max = 1024.0
)

// The weight of a set of groups. The set as a whole competes with the other programs of the
// machine. It has a hundred times the weight of a program, so that its groups reach their limits on
// a busy machine, too.
const (
	weightV1 = "102400" // in version 1; a program has 1024
	weightV2 = "10000"  // in version 2; a program has 100
)

// Hierarchy is the hierarchy of control groups that can limit CPU time.
type Hierarchy struct {
	root string // where it is mounted
	v2   bool
}

// ErrNone is the error of Find on a machine without a hierarchy that can limit CPU time.
var ErrNone = errors.New("no control groups for CPU time are mounted, " +
	"neither version 1 with the controller cpu, nor version 2")

// Find finds the hierarchy in the mount table. It returns ErrNone if there is none.
func Find() (Hierarchy, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return Hierarchy{}, err
	}
	return find(string(mounts))
}

// find finds the hierarchy in a mount table in the form of /proc/self/mounts. It prefers version 1
// with the controller cpu: if that is mounted, version 2 does not have the controller.
func find(mounts string) (Hierarchy, error) {
	unified := ""
	for line := range strings.Lines(mounts) {
		fields := strings.Fields(line) // device, directory, type, options
		if len(fields) < 4 {
			continue
		}
		switch {
		case fields[2] == "cgroup" && slices.Contains(strings.Split(fields[3], ","), "cpu"):
			return Hierarchy{root: fields[1]}, nil
		case fields[2] == "cgroup2" && unified == "":
			unified = fields[1]
		}
	}
	if unified == "" {
		return Hierarchy{}, ErrNone
	}
	return Hierarchy{root: unified, v2: true}, nil
}

// Create makes a group in a set of groups. It also makes the set, if it does not exist. All
// processes of the group together get at most the CPU time of the given number of CPUs.
func (h Hierarchy) Create(set, group string, cpus float64) error {
	parent, dir := filepath.Join(h.root, set), filepath.Join(h.root, set, group)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	period := period.Microseconds()
	quota := int64(math.Round(cpus * float64(period)))
	if !h.v2 {
		return errors.Join(
			write(parent, "cpu.shares", weightV1),
			write(dir, "cpu.cfs_period_us", strconv.FormatInt(period, 10)),
			write(dir, "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)),
		)
	}
	// In version 2, a group has the files of a controller only if its parent has enabled the
	// controller. So enable it from the root on.
	return errors.Join(
		write(h.root, "cgroup.subtree_control", "+cpu"),
		write(parent, "cpu.weight", weightV2),
		write(parent, "cgroup.subtree_control", "+cpu"),
		write(dir, "cpu.max", fmt.Sprintf("%d %d", quota, period)),
	)
}

// write writes to a file that the kernel has created.
func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// Command returns a shell command that moves its own process into a group, and then replaces itself
// by the given command. So all processes of the given command are in the group from their start.
func (h Hierarchy) Command(set, group string, command []string) []string {
	processes := filepath.Join(h.root, set, group, "cgroup.procs")
	return append([]string{"/bin/sh", "-c", `echo $$ >"$0" && exec "$@"`, processes}, command...)
}

// patience is how long Remove waits for the kernel, which may still count processes that have
// ended.
const patience = 10 * time.Second

// Remove removes a set with all of its groups. All of their processes must have ended. It returns
// nil if the set does not exist.
func (h Hierarchy) Remove(set string) error {
	groups, err := filepath.Glob(filepath.Join(h.root, set, "*", "cgroup.procs"))
	if err != nil {
		return err
	}
	for _, file := range groups {
		if err := remove(filepath.Dir(file)); err != nil {
			return err
		}
	}
	return remove(filepath.Join(h.root, set))
}

// remove removes the directory of a group. It tries again while the kernel reports that the group
// is busy.
func remove(dir string) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		err := os.Remove(dir)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case !errors.Is(err, unix.EBUSY) || time.Now().After(deadline):
			return err
		}
	}
}
