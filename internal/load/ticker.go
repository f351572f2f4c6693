// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ticker ticks at an interval.
type ticker interface {
	// wait returns true at the next tick, and false after close. If ticks have passed since the
	// last wait, it returns at once, and only once for all of them.
	wait() bool
	close()
}

// kernelTicker is a timer of the kernel (timerfd_create(2)). Its tick wakes one thread. A tick of a
// time.Ticker costs more than twice as much CPU time, because it also wakes the monitor thread of
// the Go runtime, and a thread that looks for more work. An ordinary system call wakes them, too.
// So this type reads the timer by raw system calls, which do not block.
type kernelTicker struct {
	file *os.File
	conn syscall.RawConn
	read func(fd uintptr) bool // reads the timer; false if there was no tick
	last [8]byte               // the number of ticks that was read; it is not used
}

// newKernelTicker returns a ticker with this interval.
func newKernelTicker(interval time.Duration) (ticker, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a timer: %w", err)
	}
	t := &kernelTicker{file: os.NewFile(uintptr(fd), "timer")}
	every := unix.NsecToTimespec(interval.Nanoseconds())
	err = unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: every, Value: every}, nil)
	if err == nil {
		t.conn, err = t.file.SyscallConn()
	}
	if err != nil {
		t.close()
		return nil, fmt.Errorf("set a timer to %v: %w", interval, err)
	}
	t.read = func(fd uintptr) bool {
		_, _, errno := unix.RawSyscall(unix.SYS_READ, fd,
			uintptr(unsafe.Pointer(&t.last)), unsafe.Sizeof(t.last))
		return errno == 0 // otherwise EAGAIN: there was no tick
	}
	return t, nil
}

func (t *kernelTicker) wait() bool { return t.conn.Read(t.read) == nil }

func (t *kernelTicker) close() { _ = t.file.Close() }
