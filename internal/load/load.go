// SPDX-License-Identifier: Apache-2.0

// Package load reads the load of a service's application on this server from files and shared
// memory of the application, its web server or the kernel. It sends no requests.
//
// docs/operate/load-sources.md describes the sources to operators.
package load

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Load is the load of an application, in units of its source: workers, requests or thousandths of a
// CPU. Only the ratio of the two numbers can be compared between sources.
type Load struct {
	Busy     uint32 // in use; may exceed Capacity if an application counts waiting requests
	Capacity uint32 // at most in use at a time; never 0
}

// Source is the load source of one application.
type Source interface {
	// Read returns the present load. The error names the file and the value. Only one goroutine
	// calls Read at a time. A Read may block forever, as file systems do.
	Read() (Load, error)
}

// openRegular opens a file of another owner. It refuses FIFOs and devices, and does not wait for
// the writer of a FIFO.
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

// readRegular reads a file into buffer, which grows if necessary. The size of the file must be
// between the bounds, in bytes.
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
