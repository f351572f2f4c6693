// SPDX-License-Identifier: Apache-2.0

// Package bpfclock reads clocks as BPF programs do. A process in a time namespace
// (time_namespaces(7)) sees these clocks with an offset, and BPF programs see them without. None of
// the clocks follows changes of the date and time.
package bpfclock

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Monotonic returns the clock of bpf_ktime_get_ns, CLOCK_MONOTONIC. It makes a raw system call,
// which does not tell the Go scheduler.
func Monotonic() (time.Duration, error) { return read(unix.CLOCK_MONOTONIC, "monotonic") }

// Boot returns the clock of bpf_ktime_get_boot_ns, CLOCK_BOOTTIME: the time since the system was
// booted, including the time for which it was suspended.
func Boot() (time.Duration, error) { return read(unix.CLOCK_BOOTTIME, "boottime") }

// read returns a clock as BPF programs see it: without the offset that the process's time namespace
// adds. name is the key of the clock in offsets.
func read(clock int32, name string) (time.Duration, error) {
	offsets, err := offsets()
	if err != nil {
		return 0, err
	}
	now, err := seen(clock)
	return now - offsets[name], err
}

// offsets returns what the process's time namespace adds to each clock, by the clock's name. It
// reads the file once: the offsets cannot change while there is a process in the namespace.
var offsets = sync.OnceValues(func() (map[string]time.Duration, error) {
	const file = "/proc/self/timens_offsets"
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) { // a kernel without time namespaces
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	offsets, err := parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return offsets, nil
})

// parse reads lines with a clock's name and offset: seconds (may be negative) and nanoseconds.
func parse(text string) (map[string]time.Duration, error) {
	offsets := map[string]time.Duration{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			return nil, fmt.Errorf("%q: must be a clock, seconds and nanoseconds", line)
		}
		seconds, err1 := strconv.ParseInt(fields[1], 10, 64)
		nanoseconds, err2 := strconv.ParseInt(fields[2], 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return nil, fmt.Errorf("%q: %w", line, err)
		}
		offsets[fields[0]] = time.Duration(seconds)*time.Second + time.Duration(nanoseconds)
	}
	return offsets, nil
}

// seen returns a clock as the process sees it.
func seen(clock int32) (time.Duration, error) {
	var now unix.Timespec
	if err := gettime(clock, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return time.Duration(now.Nano()), nil
}
