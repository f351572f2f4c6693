// SPDX-License-Identifier: Apache-2.0

package runstate

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Process is one that runs an instance.
type Process struct {
	PID   int       `json:"pid"`
	Since time.Time `json:"since"` // when it took the instance over
}

// FindProcess returns the process that runs an instance; nil: none does. It sees those of its own PID
// namespace and of the namespaces in that.
func FindProcess(instance string) (*Process, error) {
	process, err := findHolder(LockFile(instance))
	if err != nil {
		return nil, fmt.Errorf("find the process of instance %q: %w", instance, err)
	}
	return process, nil
}

// findHolder finds who holds a lock without taking it, or a process that starts meanwhile would be refused.
func findHolder(path string) (*Process, error) {
	file, err := os.OpenFile(path, unix.O_PATH, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	defer file.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	name, err := nameInLocks(file, stat.Dev)
	if err != nil {
		return nil, err
	}
	const table = "/proc/locks"
	locks, err := os.Open(table)
	if err != nil {
		return nil, err
	}
	defer locks.Close()
	for lines := bufio.NewScanner(locks); ; {
		if !lines.Scan() {
			return nil, lines.Err()
		}
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || fields[1] != "FLOCK" || fields[5] != name {
			continue
		}
		pid, err := strconv.Atoi(fields[4])
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", table, lines.Text(), err)
		}
		return &Process{pid, time.Unix(stat.Mtim.Unix())}, nil
	}
}

// nameInLocks returns what /proc/locks calls a file: the device of its mount and the number of its
// inode (proc_locks(5)). What stat(2) tells may be others, on btrfs, and on overlayfs with layers on
// different file systems. Of a mount that is outside of the process's root (chroot(2)) only the
// device that stat(2) tells is known.
func nameInLocks(file *os.File, statDevice uint64) (string, error) {
	path := fmt.Sprintf("/proc/self/fdinfo/%d", file.Fd())
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	var mount, inode string
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch key {
		case "mnt_id":
			mount = strings.TrimSpace(value)
		case "ino": // since Linux 5.14
			inode = strings.TrimSpace(value)
		}
	}
	if mount == "" || inode == "" {
		return "", fmt.Errorf("%s: no mount or inode in %q", path, text)
	}
	device, found, err := deviceOf(mount)
	if err != nil {
		return "", err
	}
	if !found {
		device = statDevice
	}
	return fmt.Sprintf("%02x:%02x:%s", unix.Major(device), unix.Minor(device), inode), nil
}

// deviceOf looks a mount up in /proc/self/mountinfo, by its number.
func deviceOf(mount string) (device uint64, found bool, err error) {
	const table = "/proc/self/mountinfo"
	mounts, err := os.Open(table)
	if err != nil {
		return 0, false, err
	}
	defer mounts.Close()
	for lines := bufio.NewScanner(mounts); ; {
		if !lines.Scan() {
			return 0, false, lines.Err()
		}
		fields := strings.Fields(lines.Text()) // number, number of the parent, device, and more
		if len(fields) < 3 || fields[0] != mount {
			continue
		}
		var major, minor uint32
		if _, err := fmt.Sscanf(fields[2], "%d:%d", &major, &minor); err != nil {
			return 0, false, fmt.Errorf("%s: %q: %w", table, lines.Text(), err)
		}
		return unix.Mkdev(major, minor), true, nil
	}
}
