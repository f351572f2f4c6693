// SPDX-License-Identifier: Apache-2.0

package daemon

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
	var stat unix.Stat_t
	if err := unix.Stat(path, &stat); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	// As in proc_locks(5).
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev), stat.Ino)
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
		if len(fields) < 6 || fields[1] != "FLOCK" || fields[5] != file {
			continue
		}
		pid, err := strconv.Atoi(fields[4])
		if err != nil {
			return nil, fmt.Errorf("%s: %q: %w", table, lines.Text(), err)
		}
		return &Process{pid, time.Unix(stat.Mtim.Unix())}, nil
	}
}
