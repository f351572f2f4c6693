// SPDX-License-Identifier: Apache-2.0

// Package rundir manages the files of an instance in /run/segue: a lock, which one process at a
// time holds, and a record, in which this process describes itself.
package rundir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
)

// runDir is the directory of the files. They last until the host reboots.
const runDir = "/run/segue"

const lockSuffix = ".lock"

// LockFile returns the path of an instance's lock file. The file exists from the instance's first
// start until the instance is detached. If the first start fails, the file is removed at once.
func LockFile(instance string) string {
	return filepath.Join(runDir, instance+lockSuffix)
}

// SocketFile returns the path of the socket of an instance's API. The file exists while the
// instance's process runs. A process that is killed leaves it.
func SocketFile(instance string) string { return socketFile(LockFile(instance)) }

func socketFile(lockFile string) string { return strings.TrimSuffix(lockFile, lockSuffix) + ".sock" }

// ErrRunning is wrapped in the error of Lock if a process runs the instance.
var ErrRunning = errors.New("is already running")

// Lock ensures that only one process at a time runs an instance. The lock is held until the
// returned file is closed or the process ends. If another process holds the lock, the error wraps
// ErrRunning.
func Lock(instance string) (*os.File, error) {
	if err := desired.CheckInstance(instance); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return nil, refused(instance, err)
	}
	file, err := openLocked(LockFile(instance))
	if err != nil {
		return nil, refused(instance, err)
	}
	return file, nil
}

// refused returns the error that says why an instance cannot be locked.
func refused(instance string, err error) error {
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return running(instance)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("instance %q: needs root: %w", instance, err)
	}
	return fmt.Errorf("instance %q: %w", instance, err)
}

// running returns the error that another process runs an instance. It names the process.
func running(instance string) error {
	process, err := FindProcess(instance)
	if err != nil {
		return fmt.Errorf("instance %q %w: %w", instance, ErrRunning, err)
	}
	if process == nil { // FindProcess does not see it, or it has just ended, which is unlikely
		return fmt.Errorf("instance %q %w in another PID namespace", instance, ErrRunning)
	}
	return fmt.Errorf("instance %q %w: process %d, since %s", instance, ErrRunning, process.PID,
		process.Since.Format(time.RFC3339))
}

// openLocked opens and locks a file. Between the two steps, another process may remove the file by
// Unlock. Then the lock excludes no process, because the next one makes a new file. So openLocked
// starts again.
func openLocked(path string) (*os.File, error) {
	for {
		file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			_ = file.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		locked, err := file.Stat()
		if err != nil {
			_ = file.Close()
			return nil, err
		}
		if now, err := os.Stat(path); err == nil && os.SameFile(locked, now) {
			return file, stamp(file)
		}
		_ = file.Close()
	}
}

// stamp sets the file's modification time to the present. FindProcess reads the time of the lock
// there.
func stamp(file *os.File) error {
	if err := unix.Futimes(int(file.Fd()), nil); err != nil {
		return errors.Join(fmt.Errorf("stamp %s: %w", file.Name(), err), file.Close())
	}
	return nil
}

// Unlock removes the lock file of an instance that is removed from the host, and closes the lock.
// It also removes the record and the socket, if a killed process has left them.
func Unlock(lock *os.File) error {
	var err error
	for _, file := range []string{recordFile(lock.Name()), socketFile(lock.Name())} {
		if problem := os.Remove(file); !errors.Is(problem, os.ErrNotExist) {
			err = errors.Join(err, problem)
		}
	}
	return errors.Join(err, os.Remove(lock.Name()), lock.Close())
}
