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

// pidFile is the path of a file with the PID and the start time of a process. Together they
// identify the process, because a PID that is reused has another start time. The file may be
// missing.
type pidFile string

// write stores the process in the file. It returns errEnded if the process has ended.
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

// read returns the PID and the start time in the file.
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

// alive returns the PID in the file, and whether the process still runs.
func (f pidFile) alive() (pid int, alive bool) {
	pid, start, err := f.read()
	if err != nil {
		return 0, false
	}
	now, err := startTime(pid)
	return pid, err == nil && now == start
}

// holds tells whether the process with this PID is the one in the file, and not a later one with
// the same PID.
func (f pidFile) holds(pid int) bool {
	own, alive := f.alive()
	return alive && own == pid
}

// end sends a signal to the process, waits until it has ended, and removes the file. If the process
// does not run, it only removes the file.
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
// process has ended. Each Process starts a session, whose number is the PID of the Process.
func sessionOf(pid int) int {
	fields, err := statOf(pid)
	if err != nil {
		return 0
	}
	session, _ := strconv.Atoi(fields[6])
	return session
}

// statOf returns the fields 3 to 22 of /proc/PID/stat, indexed by their numbers in
// proc_pid_stat(5). It returns fs.ErrNotExist if the process has ended, also if it is a zombie.
func statOf(pid int) (fields [23]string, err error) {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return fields, err
	}
	// Field 2, the command in parentheses, may itself contain blanks and parentheses. So the next
	// fields begin behind the last parenthesis. Field 3, the state, is the first of them.
	words := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if copy(fields[3:], words) < len(fields)-3 {
		return fields, fmt.Errorf("process %d: too few fields in %q", pid, stat)
	}
	if fields[3] == "Z" { // a zombie has ended
		return fields, fs.ErrNotExist
	}
	return fields, nil
}

// withPidfd calls f with a file descriptor that refers to the process, and never to a later process
// with the same PID. If the process has ended, it does nothing and returns nil. It also does
// nothing if meant returns false: then the PID belongs to a process that the caller does not mean.
// If the process ends while f runs, it returns nil.
func withPidfd(pid int, meant func(pid int) bool, f func(fd int) error) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	// Call meant only now, after PidfdOpen: if the PID still belongs to the process that the caller
	// means, then fd refers to this process, too.
	if !meant(pid) {
		return nil
	}
	if err := f(fd); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("process %d: %w", pid, err)
	}
	return nil
}

// endProcess sends a signal to a process, once a second until the process has ended. After
// stopTimeout it kills the process. It does nothing if meant returns false (withPidfd).
func endProcess(pid int, meant func(pid int) bool, signal unix.Signal) error {
	return withPidfd(pid, meant, func(fd int) error {
		// The signal is sent repeatedly, because nginx loses signals that arrive while it starts.
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

// pollPidfd waits until a process ends, at most for the timeout. It tells whether the process
// ended.
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

// isIn tells whether a process is in the network namespace at a path. The answer is no if either
// has vanished.
func isIn(pid int, namespacePath string) bool {
	namespace, err := os.Stat(namespacePath)
	if err != nil {
		return false
	}
	own, err := os.Stat(filepath.Join("/proc", strconv.Itoa(pid), "ns/net"))
	return err == nil && os.SameFile(namespace, own)
}

// removeFile removes a file. It returns nil if the file does not exist.
func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
