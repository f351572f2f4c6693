// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"cmp"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// firstColumns are those that every file of runs has. The column warnings is their number. Further
// columns are quantities of claims, with the prefix of their source.
var firstColumns = []string{"case", "point", "seed", "requests", "failed", "warnings"}

// responseSource is a response of a run that a file of runs has. Its columns begin with the prefix.
type responseSource struct {
	prefix string
	of     func(*Run) *Response // may return nil
	set    func(*Run, Response)
}

// responseSources are the sources of the columns of response times, in their order in files.
var responseSources = []responseSource{
	{"", measured, func(run *Run, r Response) { run.Measured = r }},
	{TypePage + " ", ofType(TypePage), setType(TypePage)},
	{TypeStatic + " ", ofType(TypeStatic), setType(TypeStatic)},
	{"simulated ", simulated, func(run *Run, r Response) { run.Simulated = &r }},
	{"omniscient ", func(run *Run) *Response { return run.Bound }, func(run *Run, r Response) { run.Bound = &r }},
	{"model ", modelled, func(run *Run, r Response) { run.Model = &r }},
}

func ofType(name string) func(*Run) *Response {
	return func(run *Run) *Response {
		if r, ok := run.Types[name]; ok {
			return &r
		}
		return nil
	}
}

func setType(name string) func(*Run, Response) {
	return func(run *Run, r Response) {
		if run.Types == nil {
			run.Types = map[string]Response{}
		}
		run.Types[name] = r
	}
}

// quantities are the columns of a response in a file of runs, in their order.
var quantities = []string{"mean", "p50", "p75", "p90", "p99", "large"}

// CSV returns a line for each run, with all quantities of claims, below the names of the columns.
// Times are in seconds. A comment before them names the build, the machine and the speed. Columns
// that are 0 or unknown in all runs are left out.
func (r *Results) CSV() ([]byte, error) {
	var lines []map[string]string // by column
	columns := slices.Clone(firstColumns)
	used := map[string]bool{}
	for i := range r.Runs {
		run := &r.Runs[i]
		line := map[string]string{
			"case": run.Case, "point": exact(run.Point), "seed": strconv.FormatUint(run.Seed, 10),
			"requests": strconv.FormatUint(run.Requests, 10), "failed": strconv.FormatUint(run.Failed, 10),
			"warnings": strconv.Itoa(len(run.Warnings)),
		}
		for column, v := range run.values() {
			line[column] = strconv.FormatFloat(v, 'g', 5, 64)
			used[column] = used[column] || v != 0
		}
		lines = append(lines, line)
	}
	for _, column := range valueColumns() {
		if used[column] {
			columns = append(columns, column)
		}
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "# %s, made by Segue %s on Linux %s with %d cores of %s, at speed %v, on %s\n",
		r.Experiment, r.Environment.Version, r.Environment.Kernel, r.Environment.Cores, r.Environment.CPU,
		r.Speed, r.Environment.Started.Format("2006-01-02"))
	if n := r.repeated(); n > 0 {
		fmt.Fprintf(&out, "# %d of the runs were repeated, because other programs had disturbed them\n", n)
	}
	w := csv.NewWriter(&out)
	if err := w.Write(columns); err != nil {
		return nil, err
	}
	for _, line := range lines {
		var record []string
		for _, column := range columns {
			record = append(record, line[column])
		}
		if err := w.Write(record); err != nil {
			return nil, err
		}
	}
	w.Flush()
	return out.Bytes(), w.Error()
}

// repeated returns how many of the runs were repeated.
func (r *Results) repeated() (n int) {
	for i := range r.Runs {
		n += min(r.Runs[i].Machine.Repeats, 1)
	}
	return n
}

// valueColumns are all columns that a file of runs may have behind the first ones, in their order.
func valueColumns() (columns []string) {
	for _, source := range responseSources {
		for _, quantity := range quantities {
			columns = append(columns, source.prefix+quantity)
		}
	}
	for _, quantity := range slices.Sorted(maps.Keys(runQuantities)) {
		if quantity != "failed" { // a column of its own
			columns = append(columns, quantity)
		}
	}
	return columns
}

// values returns the values of a run that are known, by column.
func (r *Run) values() map[string]float64 {
	values := map[string]float64{}
	add := func(column string, v float64) {
		if !math.IsNaN(v) && !math.IsInf(v, 0) {
			values[column] = v
		}
	}
	for _, source := range responseSources {
		if response := source.of(r); response != nil {
			for _, quantity := range quantities {
				add(source.prefix+quantity, responseQuantities[quantity](response))
			}
		}
	}
	for quantity, of := range runQuantities {
		if quantity != "failed" {
			add(quantity, of(r))
		}
	}
	return values
}

func exact(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

// ReadCSV reads a file of runs, EXPERIMENT.csv, which CSV has written. The results have the claims of
// the present experiment, judged by these runs. They have only the values of the file: no shares of
// servers, for example.
func ReadCSV(path string) (*Results, error) {
	e, _, err := Load(strings.TrimSuffix(filepath.Base(path), ".csv"))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	r := &Results{
		Experiment: e.Name, Title: e.Title, Paper: e.Paper, Kind: e.Kind,
		Axis: Axis{Key: string(e.Axis), Label: axisLabels[e.Axis]}, Claims: slices.Clone(e.Claims),
	}
	lines := csv.NewReader(file)
	lines.Comment = '#'
	columns, err := lines.Read()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for {
		record, err := lines.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		var run *Run
		if err == nil {
			run, err = readRun(e, columns, record)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		r.Runs = append(r.Runs, *run)
	}
	r.complete(e)
	return r, nil
}

// readRun reads a line of a file of runs.
func readRun(e *Experiment, columns, record []string) (*Run, error) {
	run := &Run{read: map[string]float64{}}
	for i, column := range columns {
		text := record[i]
		if column == "case" {
			run.Case = text
			continue
		}
		if text == "" {
			continue
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("%s %q: must be a number", column, text)
		}
		run.read[column] = v
	}
	if !slices.ContainsFunc(e.Cases, func(c Case) bool { return c.Name == run.Case }) {
		return nil, fmt.Errorf("case %q: the experiment has no such case", run.Case)
	}
	run.Point, run.Seed = run.read["point"], uint64(run.read["seed"])
	run.Requests, run.Failed = uint64(run.read["requests"]), uint64(run.read["failed"])
	for _, source := range responseSources {
		value := func(quantity string) float64 { return run.read[source.prefix+quantity] }
		response := Response{
			Mean: value("mean"), P50: value("p50"), P90: value("p90"), P99: value("p99"), Large: value("large"),
		}
		if p75 := value("p75"); p75 > 0 {
			response.Distribution = []DistributionPoint{{Seconds: p75, Share: 0.75}}
		}
		if response.Mean > 0 {
			source.set(run, response)
		}
	}
	return run, nil
}

// complete sets what follows from the runs: the cases in the experiment's order, points, seeds and
// verdicts.
func (r *Results) complete(e *Experiment) {
	r.Planned = len(r.Runs)
	seeds := map[uint64]bool{}
	for i := range r.Runs {
		seeds[r.Runs[i].Seed] = true
		r.Points = append(r.Points, r.Runs[i].Point)
	}
	r.Seeds = len(seeds)
	slices.SortFunc(r.Points, cmp.Compare[float64])
	r.Points = slices.Compact(r.Points)
	for _, c := range e.Cases {
		if slices.ContainsFunc(r.Runs, func(run Run) bool { return run.Case == c.Name }) {
			r.Cases = append(r.Cases, c.Name)
		}
	}
	for i := range r.Claims {
		r.Claims[i].judge(r)
	}
}

// quantity returns a quantity of runQuantities. If the run was read from a file of runs, the file has
// it, or it is NaN.
func (r *Run) quantity(name string) float64 {
	if r.read == nil || name == "failed" {
		return runQuantities[name](r)
	}
	if v, ok := r.read[name]; ok {
		return v
	}
	return math.NaN()
}
