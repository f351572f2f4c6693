// SPDX-License-Identifier: Apache-2.0

package rundir

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

// Process is a process that runs an instance.
type Process struct {
	PID   int       `json:"pid"`
	Since time.Time `json:"since"` // when it took over the instance
}

// FindProcess returns the process that runs an instance, or nil if none does. It sees processes of
// its own PID namespace and of nested ones.
func FindProcess(instance string) (*Process, error) {
	process, err := findHolder(LockFile(instance))
	if err != nil {
		return nil, fmt.Errorf("find the process of instance %q: %w", instance, err)
	}
	return process, nil
}

// findHolder finds the process that holds a lock, by /proc/locks (proc_locks(5)). It does not try
// to take the lock: a process that starts at this moment would then fail.
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
	lines := bufio.NewScanner(locks)
	for lines.Scan() {
		// The fields are the number of the lock, type, mode, access, process and name of the file.
		fields := strings.Fields(lines.Text())
		if len(fields) < 6 || fields[1] != "FLOCK" || fields[5] != name {
			continue
		}
		pid, err := strconv.Atoi(fields[4])
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", table, lines.Text(), err)
		}
		return &Process{pid, time.Unix(stat.Mtim.Unix())}, nil // stamp has set the time
	}
	return nil, lines.Err()
}

// nameInLocks returns the name of a file in /proc/locks: the device of its mount and the number of
// its inode (proc_locks(5)). stat(2) can return other numbers, on btrfs, and on overlayfs with
// layers on different file systems. If the mount is outside the process's root (chroot(2)), only
// the device from stat(2) is known, and nameInLocks uses that.
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

// deviceOf looks up the device of a mount in /proc/self/mountinfo, by the number of the mount.
func deviceOf(mount string) (device uint64, found bool, err error) {
	const table = "/proc/self/mountinfo"
	mounts, err := os.Open(table)
	if err != nil {
		return 0, false, err
	}
	defer mounts.Close()
	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
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
	return 0, false, lines.Err()
}
