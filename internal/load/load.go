// SPDX-License-Identifier: Apache-2.0

// Package load tells how busy the application of a service is on this server: it reads what the
// application, its web server or the kernel says, without asking any of them.
//
// docs/load-sources.md describes the sources to operators.
package load

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Load is how busy an application is, in units that its source defines: workers, requests or
// thousandths of a CPU. Only the ratio of the two can be compared between sources.
type Load struct {
	Busy     uint32 // in use; may exceed Capacity, where an application counts what waits
	Capacity uint32 // at most in use at a time; never 0
}

// Source tells the load of one application.
type Source interface {
	// Read returns the load of this moment. An error says that there is none, and names the file and
	// the value that it is about. One goroutine calls at a time. A Read may hang, as file systems do:
	// whoever calls must live with that.
	Read() (Load, error)
}

// openRegular opens a file that others own. It neither waits for the writer of a FIFO nor lets a
// device be read.
func openRegular(path string) (*os.File, os.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: not a regular file: %v", path, info.Mode().Type())
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// readRegular reads a file of a size between bounds, in bytes, into buffer, which grows to hold it.
func readRegular(path string, buffer []byte, low, high int64) ([]byte, error) {
	f, info, err := openRegular(path)
	if err != nil {
		return buffer, err
	}
	defer f.Close()
	size := info.Size()
	if size < low || size > high {
		return buffer, fmt.Errorf("%s: size is %d bytes, outside %d to %d", path, size, low, high)
	}
	if int64(cap(buffer)) < size {
		buffer = make([]byte, size)
	}
	buffer = buffer[:size]
	if _, err := io.ReadFull(f, buffer); err != nil {
		return buffer, fmt.Errorf("%s: %w", path, err)
	}
	return buffer, nil
}
