// SPDX-License-Identifier: Apache-2.0

// Package load reads the load of a service's application on this server. It reads files and shared
// memory of the application, its web server or the kernel, and sends no requests.
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
// CPU. Only the ratio of Busy to Capacity can be compared between sources.
type Load struct {
	Busy     uint32 // units in use; more than Capacity if an application counts waiting requests
	Capacity uint32 // units that can be in use at a time; never 0
}

// Source is the load source of one application.
type Source interface {
	// Read returns the present load. The error names the file, and a value that is wrong. Only one
	// goroutine calls Read at a time. A Read may block forever, because a file system can.
	Read() (Load, error)
}

// openRegular opens a file whose owner is not trusted. It refuses everything but regular files. If
// the file is a FIFO, it does not wait for a writer.
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

// readRegular reads a file into buffer, and returns the buffer. If buffer is too small, it makes a
// new one. The size of the file must be low to high bytes.
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
