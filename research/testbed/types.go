// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"compress/gzip"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/gonum/stat"
)

// The types of requests for a wiki. The papers tell them apart by the path, too (HLB,
// footnote 9).
const (
	TypePage   = "page"
	TypeStatic = "static file"

	pagePath = "/wiki/index.php/"
)

// The columns of the file of the requests.
const (
	columnTime = iota
	columnQuery
	columnServer
	columnOutcome
	columnLatency
)

// eachSuccess reads the file of the requests. It calls f for each request that succeeded, with the
// time at which it was sent.
func eachSuccess(path string, f func(sent float64, row []string) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	unpacked, err := gzip.NewReader(file)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for lines := csv.NewReader(unpacked); ; {
		row, err := lines.Read()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return fmt.Errorf("%s: %w", path, err)
		case row[columnOutcome] != "succeeded":
			continue // a failed request, or the line with the names of the columns
		}
		sent, err := strconv.ParseFloat(row[columnTime], 64)
		if err == nil {
			err = f(sent, row)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
}

// readTypes returns the response times of the successful requests in the file, by type of request.
func readTypes(path string) (map[string]Response, error) {
	latencies := map[string][]float64{}
	err := eachSuccess(path, func(_ float64, row []string) error {
		latency, err := strconv.ParseFloat(row[columnLatency], 64) // err ends the reading below
		kind := TypeStatic
		if strings.HasPrefix(row[columnQuery], pagePath) {
			kind = TypePage
		}
		latencies[kind] = append(latencies[kind], latency)
		return err
	})
	types := map[string]Response{}
	for kind, all := range latencies {
		types[kind] = responseOf(all)
	}
	return types, err
}

// responseOf describes the distribution of times, of which there is at least one.
func responseOf(times []float64) Response {
	slices.Sort(times)
	quantile := func(p float64) float64 { return stat.Quantile(p, stat.Empirical, times, nil) }
	r := Response{Mean: stat.Mean(times, nil), P50: quantile(0.5), P90: quantile(0.9), P99: quantile(0.99)}
	for i := 1; i < 200; i++ {
		share := float64(i) / 200
		r.Distribution = append(r.Distribution, DistributionPoint{quantile(share), share})
	}
	return r
}
