// SPDX-License-Identifier: Apache-2.0

package datapathtest

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// calls are system calls at which a process can be interrupted.
type calls struct {
	bpf    []uint32 // commands of bpf(2)
	others []uint32 // numbers of other system calls
}

var (
	// changes are the calls that change something that outlives the process: the content of a map,
	// a pin, or an attachment.
	changes = calls{
		bpf: []uint32{
			unix.BPF_MAP_UPDATE_ELEM, unix.BPF_MAP_UPDATE_BATCH, unix.BPF_MAP_DELETE_ELEM,
			unix.BPF_OBJ_PIN, unix.BPF_LINK_CREATE, unix.BPF_LINK_UPDATE,
		},
		others: []uint32{
			unix.SYS_MKDIRAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2,
		},
	}
	// refusable are the changes, and the calls that create and detach the changed objects. Calls
	// that only read need not fail: a failure of the next refusable call leaves as much to undo.
	refusable = calls{
		bpf: append(slices.Clone(changes.bpf),
			unix.BPF_MAP_CREATE, unix.BPF_PROG_LOAD, unix.BPF_LINK_DETACH),
		others: changes.others,
	}
)

var crashes = flag.Int("crashes", 1,
	"how many times as many processes are killed, or have a call that fails, as in make test")

// Apart returns how far apart the system calls are that a test interrupts: step, divided by the
// flag -crashes. The distance is always odd. So tests that use two configurations in turn interrupt
// both.
func Apart(step int) int { return (step / *crashes) | 1 }

// KillBefore kills this process by SIGKILL instead of its nth system call that changes something.
// The calls of all threads count, from now on. If there is no nth call, as for 0, the process is
// not killed.
func KillBefore(n int) error {
	_, err := interrupt(changes, n, func() int32 {
		_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		return 0
	})
	return err
}

// Refused is the error of the call that FailAt makes fail. No code expects this error.
const Refused = unix.EIO

// FailAt makes the nth of some system calls of this process fail with Refused. These are the calls
// in refusable (certain commands of bpf(2), and calls that make, remove or rename a path) and the
// calls whose numbers are in others. The calls of all threads count, from now on. If there is no nth
// call, as for 0, none fails. The returned function tells whether a call has failed.
func FailAt(n int, others ...uint32) (failed func() bool, err error) {
	at := refusable
	at.others = append(slices.Clone(at.others), others...)
	return interrupt(at, n, func() int32 { return -int32(Refused) })
}

// notification and answer are struct seccomp_notif and struct seccomp_notif_resp of the kernel; see
// seccomp_unotify(2).
type notification struct {
	id         uint64
	pid, flags uint32
	number     int32
	arch       uint32
	pointer    uint64
	args       [6]uint64
}

type answer struct {
	id    uint64
	value int64
	error int32
	flags uint32
}

// interrupt calls failure at the nth of the calls, and makes the call fail with the error that
// failure returns. With the error 0 the call proceeds. The returned function tells whether there
// has been an nth call.
func interrupt(at calls, n int, failure func() int32) (reached func() bool, err error) {
	listener, err := watchCalls(at)
	if err != nil {
		return nil, fmt.Errorf("seccomp: %w", err)
	}
	var done atomic.Bool
	go func() {
		for i := 1; ; i++ {
			var call notification
			ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&call))
			reply := answer{id: call.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
			if i == n {
				done.Store(true)
				if err := failure(); err != 0 {
					reply.error, reply.flags = err, 0
				}
			}
			ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&reply))
		}
	}()
	return done.Load, nil
}

// ioctl calls ioctl(2), again if a signal interrupts the call. It panics on any other error.
func ioctl(fd int, request uint, argument unsafe.Pointer) {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request),
			uintptr(argument))
		if errno == 0 {
			return
		}
		// ENOENT: a signal has interrupted the call, and the call is repeated.
		if errno != unix.EINTR && errno != unix.ENOENT {
			panic(fmt.Sprintf("seccomp: %v", errno))
		}
	}
}

// watchCalls returns a file descriptor that reports the system calls. Each call waits for an
// answer.
func watchCalls(at calls) (listener int, err error) {
	filter := at.filter()
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC |
		unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags,
		uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return 0, errno
	}
	return int(fd), nil
}

// filter returns a program that selects the system calls, in classic BPF on struct seccomp_data.
func (c calls) filter() []unix.SockFilter {
	const (
		load = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		jump = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		end  = unix.BPF_RET | unix.BPF_K
	)
	const number, firstArgument = 0, 16
	filter := []unix.SockFilter{{Code: load, K: number}}
	// match adds a jump to the last instruction for each value. rest is the number of instructions
	// between these jumps and the last two instructions.
	match := func(values []uint32, rest int) {
		for i, value := range values {
			laterJumps := len(values) - i - 1
			skipped := uint8(laterJumps + rest + 1) // 1: the next-to-last instruction
			filter = append(filter, unix.SockFilter{Code: jump, Jt: skipped, K: value})
		}
	}
	match(c.others, len(c.bpf)+2)
	filter = append(filter,
		// Any other call than bpf(2) goes on to the next-to-last instruction.
		unix.SockFilter{Code: jump, Jf: uint8(len(c.bpf) + 1), K: unix.SYS_BPF},
		unix.SockFilter{Code: load, K: firstArgument})
	match(c.bpf, 0)
	return append(filter,
		unix.SockFilter{Code: end, K: unix.SECCOMP_RET_ALLOW},
		unix.SockFilter{Code: end, K: unix.SECCOMP_RET_USER_NOTIF})
}
