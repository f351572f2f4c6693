// SPDX-License-Identifier: Apache-2.0

// Package daemon contains the parts that the long-running commands have in common.
package daemon

import (
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Notify tells the service manager the state of the process, such as "READY=1"; see sd_notify(3).
// It does nothing if there is no service manager. It returns no error if the service manager has
// removed its socket, because some wait only for the start.
func Notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	socket, err := notifySocket()
	if err == nil {
		err = unix.Sendto(socket, []byte(state), 0, &unix.SockaddrUnix{Name: path})
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// notifySocket opens a socket at the first call, and returns the same socket at each later call. So
// a process that can open no more files can still notify the service manager.
var notifySocket = sync.OnceValues(func() (int, error) {
	return unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
})
