// SPDX-License-Identifier: Apache-2.0

package bpfclock

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

func gettime(clock int32, now *unix.Timespec) error {
	_, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, uintptr(clock), uintptr(unsafe.Pointer(now)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
