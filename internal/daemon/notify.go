// SPDX-License-Identifier: Apache-2.0

// Package daemon is what the long-running commands have in common.
package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
)

// Notify tells the service manager how the process is, as sd_notify(3): for
// example "READY=1". Without a manager it does nothing, nor when whoever listened has gone, as one that only
// waited for the start.
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
		return fmt.Errorf("notify the service manager: %w", err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	return nil
}
