// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Cgroup reads the CPU time of a control group, version 2, with all groups below it. The unit of
// the load is a thousandth of a CPU. Busy is the mean since the last Read.
type Cgroup struct {
	path string
	last sample
}

// sample is a reading of a cgroup's CPU time.
type sample struct {
	inode uint64 // inode of the folder; a new group has another one
	usage uint64 // CPU time in microseconds, which never decreases
	at    time.Time
}

// NewCgroup returns the source for the folder of a control group, which need not exist yet.
func NewCgroup(path string) *Cgroup {
	return &Cgroup{path: filepath.Clean(path)}
}

// errFirst is the error of the first Read of a group.
var errFirst = errors.New("no interval has passed yet")

// Read returns the load. It returns an error if the files of the group cannot be read. It also
// returns an error if there is no earlier reading of the same group to compare with.
func (c *Cgroup) Read() (Load, error) {
	l, err := c.read()
	if err != nil {
		return Load{}, fmt.Errorf("cgroup %s: %w", c.path, err)
	}
	return l, nil
}

// read does the work of Read. Its errors do not name the group.
func (c *Cgroup) read() (Load, error) {
	now, err := takeSample(c.path)
	if err != nil {
		c.last = sample{} // a group that comes back begins anew
		return Load{}, err
	}
	capacity, err := cpus(c.path)
	if err != nil {
		return Load{}, err
	}
	last := c.last
	c.last = now
	elapsed := now.at.Sub(last.at).Microseconds()
	if now.inode != last.inode || now.usage < last.usage || elapsed <= 0 {
		return Load{}, errFirst // last is not an earlier sample of the same group
	}
	busy := float64(now.usage-last.usage) / float64(elapsed)
	return Load{Busy: milli(busy), Capacity: max(1, milli(capacity))}, nil
}

// milli rounds a number of CPUs to thousandths.
func milli(cpus float64) uint32 {
	return uint32(math.Min(math.Round(cpus*1000), math.MaxUint32))
}

// takeSample reads the CPU time of the group in a folder.
func takeSample(path string) (sample, error) {
	info, err := os.Stat(path)
	if err != nil {
		return sample{}, bare(err)
	}
	if !isCgroup2(path) {
		return sample{}, errors.New("not a control group of version 2: no cgroup.controllers")
	}
	usage, err := readFile(path, "cpu.stat", parseUsage)
	if err != nil {
		return sample{}, err
	}
	return sample{inode: info.Sys().(*syscall.Stat_t).Ino, usage: usage, at: time.Now()}, nil
}

// isCgroup2 checks for a file that every group of version 2 has, and no group of version 1.
func isCgroup2(path string) bool {
	_, err := os.Stat(filepath.Join(path, "cgroup.controllers"))
	return err == nil
}

// cpus returns the number of CPUs that a cgroup can use at a time. It is the minimum of the CPUs of
// the machine, and of the quotas (cpu.max) and cpusets of the group and its ancestors.
func cpus(path string) (float64, error) {
	online, err := readFile("/sys/devices/system/cpu", "online", parseCPUList)
	if err != nil {
		return 0, err
	}
	least := float64(online)
	for ; isCgroup2(path); path = filepath.Dir(path) {
		granted, err := readFile(path, "cpu.max", parseMax)
		if err == nil {
			least = min(least, granted)
		} else if !errors.Is(err, fs.ErrNotExist) { // no such file: no controller, or the root
			return 0, err
		}
		set, err := readFile(path, "cpuset.cpus.effective", parseCPUList)
		if err == nil && set > 0 {
			least = min(least, float64(set))
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, err
		}
	}
	return least, nil
}

// readFile reads a small file and parses its text. Errors have the name of the file, but not of its
// folder.
func readFile[T any](folder, name string, parse func(string) (T, error)) (value T, err error) {
	f, _, err := openRegular(filepath.Join(folder, name))
	if err != nil {
		return value, fmt.Errorf("%s: %w", name, bare(err))
	}
	defer f.Close()
	text := make([]byte, 4096) // the kernel returns at most this much in one read of such files
	n, err := f.Read(text)
	if err != nil && err != io.EOF {
		return value, fmt.Errorf("%s: %w", name, bare(err))
	}
	if value, err = parse(string(bytes.TrimSpace(text[:n]))); err != nil {
		return value, fmt.Errorf("%s: %w", name, err)
	}
	return value, nil
}

// parseUsage returns the CPU time in the text of cpu.stat, in microseconds.
func parseUsage(text string) (uint64, error) {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, "usage_usec "); ok {
			usage, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("usage_usec is %q", strings.TrimSpace(value))
			}
			return usage, nil
		}
	}
	return 0, errors.New("no line usage_usec")
}

// parseMax returns the CPUs that the text of cpu.max grants: its quota divided by its period, both
// in microseconds.
func parseMax(text string) (float64, error) {
	fields := strings.Fields(text)
	if len(fields) != 2 {
		return 0, fmt.Errorf("must be a quota and a period, is %q", text)
	}
	period, err := strconv.ParseUint(fields[1], 10, 64)
	if err != nil || period == 0 {
		return 0, fmt.Errorf("period is %q", fields[1])
	}
	if fields[0] == "max" {
		return math.Inf(1), nil
	}
	quota, err := strconv.ParseUint(fields[0], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("quota is %q", fields[0])
	}
	return float64(quota) / float64(period), nil
}

// parseCPUList counts the CPUs of a list such as 0-3,8 (cpuset(7), list format).
func parseCPUList(text string) (int, error) {
	if text == "" {
		return 0, nil
	}
	count := 0
	for part := range strings.SplitSeq(text, ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		first, err1 := strconv.ParseUint(low, 10, 16)
		last, err2 := strconv.ParseUint(high, 10, 16)
		if err1 != nil || err2 != nil || last < first {
			return 0, fmt.Errorf("list of CPUs has %q", part)
		}
		count += int(last-first) + 1
	}
	return count, nil
}

// bare removes the path from an error.
func bare(err error) error {
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		return path.Err
	}
	return err
}
