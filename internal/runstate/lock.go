// SPDX-License-Identifier: Apache-2.0

// Package runstate keeps what runs an instance: the lock that one process at a time holds, and the
// record that this process writes of itself. Both lie in /run/segue.
package runstate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/config"
)

// runDir holds what lives as long as the machine is up.
const runDir = "/run/segue"

const lockSuffix = ".lock"

// LockFile is the path of an instance's lock. It exists from the instance's first start until the
// instance is gone for good.
func LockFile(instance string) string {
	return filepath.Join(runDir, instance+lockSuffix)
}

// ErrRunning is part of the error of Lock when a process runs the instance.
var ErrRunning = errors.New("is already running")

// Lock makes sure that one process at a time runs an instance. The lock is held
// until the returned file is closed, or the process ends. The error is ErrRunning if another process
// holds it.
func Lock(instance string) (*os.File, error) {
	if err := config.CheckInstance(instance); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return nil, refused(instance, err)
	}
	file, err := lockFile(LockFile(instance))
	if err != nil {
		return nil, refused(instance, err)
	}
	return file, nil
}

// refused says why an instance cannot be locked.
func refused(instance string, err error) error {
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return running(instance)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("instance %q: needs root: %w", instance, err)
	}
	return fmt.Errorf("instance %q: %w", instance, err)
}

// running says which process has the lock of an instance.
func running(instance string) error {
	process, err := FindProcess(instance)
	if err != nil {
		return fmt.Errorf("instance %q %w: %w", instance, ErrRunning, err)
	}
	if process == nil { // or it has ended just now
		return fmt.Errorf("instance %q %w in another PID namespace", instance, ErrRunning)
	}
	return fmt.Errorf("instance %q %w: process %d, since %s", instance, ErrRunning, process.PID,
		process.Since.Format(time.RFC3339))
}

// lockFile opens and locks a file. Unlock may remove it in between: what is locked then keeps nobody
// away, so it begins again.
func lockFile(path string) (*os.File, error) {
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

// stamp notes in the file's time since when it is locked, for FindProcess.
func stamp(file *os.File) error {
	if err := unix.Futimes(int(file.Fd()), nil); err != nil {
		return errors.Join(fmt.Errorf("stamp %s: %w", file.Name(), err), file.Close())
	}
	return nil
}

// Unlock removes the lock file of an instance that is gone for good, and the record that a killed
// process has left.
func Unlock(lock *os.File) error {
	err := os.Remove(recordFile(lock.Name()))
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.Remove(lock.Name()), lock.Close())
}
