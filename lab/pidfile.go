// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// pidFile is the path of a file that identifies a process by its PID and its start time. No two
// processes have both in common. The file may be missing.
type pidFile string

func (f pidFile) write(pid int) error {
	start, err := startTime(pid)
	if errors.Is(err, fs.ErrNotExist) {
		return errEnded
	}
	if err != nil {
		return err
	}
	return os.WriteFile(string(f), fmt.Appendf(nil, "%d %s\n", pid, start), 0o644)
}

// read returns the content of the file.
func (f pidFile) read() (pid int, start string, err error) {
	text, err := os.ReadFile(string(f))
	if err != nil {
		return 0, "", err
	}
	number, start, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	if pid, err = strconv.Atoi(number); err != nil {
		return 0, "", fmt.Errorf("%s: %w", f, err)
	}
	return pid, start, nil
}

// alive returns the PID of the process, and whether it runs.
func (f pidFile) alive() (pid int, alive bool) {
	pid, start, err := f.read()
	if err != nil {
		return 0, false
	}
	now, err := startTime(pid)
	return pid, err == nil && now == start
}

// holds tells whether a PID belongs to this process, and not to a later process with the same PID.
func (f pidFile) holds(pid int) bool {
	own, alive := f.alive()
	return alive && own == pid
}

// end ends the process with a signal, waits until it has ended, and removes the file. It returns
// nil if the process does not run.
func (f pidFile) end(signal unix.Signal) error {
	if pid, alive := f.alive(); alive {
		if err := endProcess(pid, f.holds, signal); err != nil {
			return err
		}
	}
	return removeFile(string(f))
}

// startTime returns the start time of a process in clock ticks since boot: field 22 of
// /proc/PID/stat. It returns fs.ErrNotExist if the process has ended.
func startTime(pid int) (string, error) {
	fields, err := statOf(pid)
	if err != nil {
		return "", err
	}
	return fields[22], nil
}

// sessionOf returns the session of a process: field 6 of /proc/PID/stat. It returns 0 if the
// process has ended. Each process of the lab leads a session, whose number is the process's PID.
func sessionOf(pid int) int {
	fields, err := statOf(pid)
	if err != nil {
		return 0
	}
	session, _ := strconv.Atoi(fields[6])
	return session
}

// statOf returns the fields of /proc/PID/stat from the third on, indexed by their numbers in
// proc_pid_stat(5). A zombie counts as a process that has ended.
func statOf(pid int) (fields [23]string, err error) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return fields, err
	}
	// Field 2, the command in parentheses, may contain any characters. Field 3 is the state.
	words := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if copy(fields[3:], words) < len(fields)-3 {
		return fields, fmt.Errorf("process %d: too few fields in %q", pid, stat)
	}
	if fields[3] == "Z" {
		return fields, fs.ErrNotExist
	}
	return fields, nil
}

// withPidfd calls f with a file descriptor that refers to the process even if its PID is reused. It
// does nothing if the process has ended, or if meant returns false for it.
func withPidfd(pid int, meant func(pid int) bool, f func(fd int) error) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if !meant(pid) {
		return nil
	}
	if err := f(fd); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	return nil
}

// endProcess sends a signal to a process and waits until the process has ended. After stopTimeout
// it kills the process.
func endProcess(pid int, meant func(pid int) bool, signal unix.Signal) error {
	return withPidfd(pid, meant, func(fd int) error {
		// nginx loses signals that arrive while it starts, so the signal is sent repeatedly.
		for deadline := time.Now().Add(stopTimeout); time.Now().Before(deadline); {
			ended, err := signalAndWait(fd, signal, time.Second)
			if ended || err != nil {
				return err
			}
		}
		ended, err := signalAndWait(fd, unix.SIGKILL, stopTimeout)
		if !ended && err == nil {
			err = fmt.Errorf("did not end within %v of SIGKILL", stopTimeout)
		}
		return err
	})
}

// signalAndWait sends a signal to a process and tells whether it ended within the timeout.
func signalAndWait(fd int, signal unix.Signal, timeout time.Duration) (ended bool, err error) {
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil {
		return false, err
	}
	return pollPidfd(fd, timeout)
}

// pollPidfd waits until a process ends, and tells whether it ended within the timeout.
func pollPidfd(fd int, timeout time.Duration) (bool, error) {
	deadline := time.Now().Add(timeout)
	for {
		left := max(0, time.Until(deadline))
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

// processesIn lists the processes in a network namespace, except for this process.
func processesIn(namespacePath string) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err == nil && pid != os.Getpid() && isIn(pid, namespacePath) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func isIn(pid int, namespacePath string) bool {
	// The process and the namespace may vanish at any time. The answer is no then.
	namespace, err := os.Stat(namespacePath)
	if err != nil {
		return false
	}
	own, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "ns/net"))
	return err == nil && os.SameFile(namespace, own)
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
