// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bufio"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
)

const (
	arrivalsFile = "arrivals.tsv"
	requestsFile = "requests.csv.gz"
)

// files are those that the generator writes.
type files struct {
	arrivals, requests io.Writer
	closers            []func() error
}

// createFiles creates the file of the requests and, if records is true, that of the arrivals.
func createFiles(folder string, records bool) (f *files, err error) {
	f = &files{}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if records {
		arrivals, err := f.create(filepath.Join(folder, arrivalsFile))
		if err != nil {
			return nil, err
		}
		f.arrivals = arrivals
	}
	requests, err := f.create(filepath.Join(folder, requestsFile))
	if err != nil {
		return nil, err
	}
	zipped := gzip.NewWriter(requests)
	buffer := bufio.NewWriter(zipped)
	f.closers = append(f.closers, zipped.Close, buffer.Flush) // called in the reverse order
	f.requests = buffer
	return f, nil
}

// create creates a file, which close closes.
func (f *files) create(path string) (*os.File, error) {
	file, err := os.Create(path)
	if err == nil {
		f.closers = append(f.closers, file.Close)
	}
	return file, err
}

// close writes what is left, and closes the files, in the reverse order of their creation.
func (f *files) close() error {
	var errs []error
	for _, closer := range slices.Backward(f.closers) {
		errs = append(errs, closer())
	}
	f.closers = nil
	return errors.Join(errs...)
}
