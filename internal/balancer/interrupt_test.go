// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bpfCommands and pathCalls are the system calls that change something that outlives the process:
// what a map holds, what is pinned, what is attached.
var (
	bpfCommands = []uint32{
		unix.BPF_MAP_UPDATE_ELEM, unix.BPF_MAP_UPDATE_BATCH, unix.BPF_MAP_DELETE_ELEM,
		unix.BPF_OBJ_PIN, unix.BPF_LINK_CREATE, unix.BPF_LINK_UPDATE,
	}
	pathCalls = []uint32{unix.SYS_MKDIRAT, unix.SYS_UNLINKAT, unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2}
)

// notification and answer are struct seccomp_notif and struct seccomp_notif_resp of the kernel, see
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

// killBefore has this process killed by SIGKILL in the place of its nth system call, from now on, that
// changes something. It works on all threads; 0 and more than there are kill nobody.
func killBefore(n int) error {
	listener, err := watchCalls()
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	go func() {
		for i := 1; ; i++ {
			var call notification
			ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&call))
			if i == n {
				unix.Kill(os.Getpid(), unix.SIGKILL)
			}
			proceed := answer{id: call.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}
			ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&proceed))
		}
	}()
	return nil
}

func ioctl(fd int, request uint, argument unsafe.Pointer) {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(argument))
		if errno == 0 {
			return
		}
		// ENOENT: a signal has come first, and the call comes again.
		if errno != unix.EINTR && errno != unix.ENOENT {
			panic(fmt.Sprintf("seccomp: %v", errno))
		}
	}
}

// watchCalls returns the descriptor that tells of the system calls, each of which waits for an answer.
func watchCalls() (listener int, err error) {
	filter := callFilter()
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC |
		unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&program)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return 0, errno
	}
	return int(fd), nil
}

// callFilter picks the system calls, in classic BPF on struct seccomp_data.
func callFilter() []unix.SockFilter {
	const load, jump, end = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	const number, firstArgument = 0, 16
	filter := []unix.SockFilter{{Code: load, K: number}}
	match := func(values []uint32, after int) { // to the last instruction, which is so far behind
		for i, value := range values {
			filter = append(filter, unix.SockFilter{Code: jump, Jt: uint8(len(values) - i + after), K: value})
		}
	}
	match(pathCalls, len(bpfCommands)+2)
	filter = append(filter,
		unix.SockFilter{Code: jump, Jf: uint8(len(bpfCommands) + 1), K: unix.SYS_BPF},
		unix.SockFilter{Code: load, K: firstArgument})
	match(bpfCommands, 0)
	return append(filter,
		unix.SockFilter{Code: end, K: unix.SECCOMP_RET_ALLOW},
		unix.SockFilter{Code: end, K: unix.SECCOMP_RET_USER_NOTIF})
}
