// SPDX-License-Identifier: Apache-2.0

package report

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"

	"github.com/segue-lb/segue/research/testbed"
)

// table is a CSV file of a run that is being read. Its errors name the file, the line, the column
// and the value.
type table struct {
	path   string
	reader *csv.Reader
	header []string
	row    []string
}

// newTable reads the names of the columns.
func newTable(path string, in io.Reader) (*table, error) {
	t := &table{path: path, reader: csv.NewReader(in)}
	header, err := t.reader.Read()
	if errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: is empty, without the line of column names", path)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	t.header = header
	t.reader.ReuseRecord = true
	return t, nil
}

// next reads the next line. It returns false at the end.
func (t *table) next() (bool, error) {
	row, err := t.reader.Read()
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s: %w", t.path, err)
	}
	t.row = row
	return true, nil
}

// number returns the number in a column of the present line. It must not be negative.
func (t *table) number(column int) (float64, error) {
	v, err := strconv.ParseFloat(t.row[column], 64)
	if err != nil || !(v >= 0) || math.IsInf(v, 0) {
		line, _ := t.reader.FieldPos(column)
		return 0, fmt.Errorf("%s:%d: %s %q: must be a number from 0",
			t.path, line, t.header[column], t.row[column])
	}
	return v, nil
}

// loads are the loads of the servers over a run.
type loads struct {
	times []float64 // seconds
	// busy is the mean number of busy workers of a server, and fairness is Jain's index of these
	// numbers.
	busy, fairness []float64
}

// readLoads reads loads.csv: a line of column names, and a line for each time with the busy workers
// of each server.
func readLoads(path string) (*loads, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	t, err := newTable(path, file)
	if err != nil {
		return nil, err
	}
	if len(t.header) < 2 || t.header[0] != "time" {
		return nil, fmt.Errorf("%s:1: %q: the columns must be time and the servers", path, t.header)
	}
	l := new(loads)
	for {
		more, err := t.next()
		if !more || err != nil {
			return l, err
		}
		if err := l.add(t); err != nil {
			return nil, err
		}
	}
}

// add adds the loads of a line.
func (l *loads) add(t *table) error {
	time, err := t.number(0)
	if err != nil {
		return err
	}
	if n := len(l.times); n > 0 && time < l.times[n-1] {
		line, _ := t.reader.FieldPos(0)
		return fmt.Errorf("%s:%d: time %v: is before the time %v of the line above",
			t.path, line, time, l.times[n-1])
	}
	var sum float64
	var busy []float64
	for column := 1; column < len(t.row); column++ {
		v, err := t.number(column)
		if err != nil {
			return err
		}
		sum += v
		busy = append(busy, v)
	}
	l.times = append(l.times, time)
	l.busy = append(l.busy, sum/float64(len(busy)))
	l.fairness = append(l.fairness, testbed.Fairness(busy))
	return nil
}

// smooth applies the filter of footnote 6 of 6LB: an exponential moving average whose parameter is
// 1 - exp(-d), where d is the time between two values in seconds.
func smooth(times, values []float64) []float64 {
	smoothed := make([]float64, len(values))
	for i, v := range values {
		smoothed[i] = v
		if i > 0 {
			smoothed[i] = smoothed[i-1] + (v-smoothed[i-1])*(1-math.Exp(times[i-1]-times[i]))
		}
	}
	return smoothed
}
