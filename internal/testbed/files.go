// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

const (
	arrivalsFile = "arrivals.tsv"
	requestsFile = "requests.csv.gz"
)

// files are those that the generator writes. It writes times by the clock, and the files get
// emulated times.
type files struct {
	arrivals, requests io.Writer
	closers            []func() error
}

// createFiles creates the files. Without recorded arrivals, it leaves out the file of the arrivals.
func createFiles(folder string, speed float64, records bool) (f *files, err error) {
	f = &files{}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	if records {
		f.arrivals, err = f.create(filepath.Join(folder, arrivalsFile), '\t', []int{0}, speed, false)
		if err != nil {
			return nil, err
		}
	}
	// time, query, server, outcome, latency, exchange
	f.requests, err = f.create(filepath.Join(folder, requestsFile), ',', []int{0, 4, 5}, speed, true)
	return f, err
}

// create creates a file of CSV with a separator. It multiplies the columns with times by a factor.
func (f *files) create(
	path string, separator rune, times []int, factor float64, compressed bool,
) (io.Writer, error) {
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	f.closers = append(f.closers, file.Close)
	out := io.Writer(file)
	if compressed {
		zipped := gzip.NewWriter(file)
		f.closers = append(f.closers, zipped.Close)
		out = zipped
	}
	buffer := bufio.NewWriter(out)
	scaled := &scaler{out: csv.NewWriter(buffer), times: times, factor: factor}
	scaled.out.Comma = separator
	f.closers = append(f.closers, buffer.Flush, scaled.flush)
	return scaled, nil
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

// scaler multiplies times in the columns of CSV by a factor.
type scaler struct {
	out     *csv.Writer
	times   []int // columns
	factor  float64
	partial []byte // of a line
}

// Write implements io.Writer. Text may end within a line. Values have no line breaks.
func (s *scaler) Write(text []byte) (int, error) {
	s.partial = append(s.partial, text...)
	for {
		end := bytes.IndexByte(s.partial, '\n')
		if end < 0 {
			return len(text), nil
		}
		if err := s.line(s.partial[:end+1]); err != nil {
			return 0, err
		}
		s.partial = s.partial[end+1:]
	}
}

// line writes a line with its times multiplied. Columns that are not numbers, such as those of the
// header, stay as they are.
func (s *scaler) line(text []byte) error {
	reader := csv.NewReader(bytes.NewReader(text))
	reader.Comma = s.out.Comma
	columns, err := reader.Read()
	if err != nil {
		return fmt.Errorf("line %q: %w", text, err)
	}
	for _, i := range s.times {
		if i >= len(columns) {
			continue
		}
		if seconds, err := strconv.ParseFloat(columns[i], 64); err == nil {
			columns[i] = strconv.FormatFloat(seconds*s.factor, 'f', 9, 64)
		}
	}
	return s.out.Write(columns)
}

func (s *scaler) flush() error {
	s.out.Flush()
	return s.out.Error()
}
