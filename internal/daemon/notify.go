// SPDX-License-Identifier: Apache-2.0

// Package daemon contains the parts that the long-running commands have in common.
package daemon

import (
	"errors"
	"io/fs"
	"net"
	"os"
)

// Notify tells the service manager the state of the process, such as "READY=1"; see sd_notify(3).
// It does nothing if there is no service manager, or if the receiver has gone, because it waited
// only for the start.
func Notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(state)); err != nil {
		return err
	}
	return nil
}
