// SPDX-License-Identifier: Apache-2.0

package report

import (
	"compress/gzip"
	"fmt"
	"os"
	"slices"

	"gonum.org/v1/gonum/stat"

	"github.com/segue-lb/segue/research/testbed"
)

// day has the requests of runs by the interval in which they were due to be sent.
type day struct {
	bin  float64 // length of an interval in seconds
	runs int
	// requests are the numbers of requests, and times are the response times of those that
	// succeeded, in ascending order.
	requests []int
	times    [][]float64
}

// mostBins bounds the number of intervals. A chart with more of them would not be readable.
const mostBins = 2000

// readDay reads the requests of runs.
func (f *folder) readDay(runs []*testbed.Run) (*day, error) {
	d := &day{bin: f.Bin, runs: len(runs)}
	for _, run := range runs {
		if err := d.read(f.file(run, "requests.csv.gz")); err != nil {
			return nil, err
		}
	}
	for _, times := range d.times {
		slices.Sort(times)
	}
	return d, nil
}

var requestColumns = []string{"time", "query", "server", "outcome", "latency", "exchange"}

// The columns that are read.
const (
	timeColumn    = 0
	outcomeColumn = 3
	latencyColumn = 4
)

// read reads requests.csv.gz, and adds each of its requests to the day.
func (d *day) read(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	t, err := newTable(path, unpacked)
	if err != nil {
		return err
	}
	if !slices.Equal(t.header, requestColumns) {
		return fmt.Errorf("%s:1: %q: the columns must be %q", path, t.header, requestColumns)
	}
	for {
		more, err := t.next()
		if !more || err != nil {
			return err
		}
		if err := d.add(t); err != nil {
			return err
		}
	}
}

// add adds the request of a line to its interval. A request that failed counts as a request, and
// has no response time.
func (d *day) add(t *table) error {
	sent, err := t.number(timeColumn)
	if err != nil {
		return err
	}
	i := int(sent / d.bin)
	if i >= mostBins {
		return fmt.Errorf("%s: a request at %v s: bins of %v s would be more than %d; use longer bins",
			t.path, sent, d.bin, mostBins)
	}
	for len(d.requests) <= i {
		d.requests, d.times = append(d.requests, 0), append(d.times, nil)
	}
	d.requests[i]++
	if t.row[outcomeColumn] != "succeeded" {
		return nil
	}
	latency, err := t.number(latencyColumn)
	if err == nil {
		d.times[i] = append(d.times[i], latency)
	}
	return err
}

// middle returns the middle of an interval in seconds.
func (d *day) middle(i int) float64 { return (float64(i) + 0.5) * d.bin }

// decile returns a decile of the response times of an interval that has any, in seconds.
func (d *day) decile(i, tenths int) float64 {
	return stat.Quantile(float64(tenths)/10, stat.LinInterp, d.times[i], nil)
}
