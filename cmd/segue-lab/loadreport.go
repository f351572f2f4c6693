// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/csv"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/lab/httpload"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// print prints the report as text, JSON or CSV.
func (f *loadFlags) print(out io.Writer, r *httpload.Report) error {
	switch {
	case f.asJSON:
		return cli.PrintJSON(out, r)
	case f.asCSV:
		return printLoadCSV(out, r, f.config.Every > 0)
	}
	return printLoad(out, r)
}

// inMilliseconds formats a number of seconds in milliseconds.
func inMilliseconds(seconds float64) string { return milliseconds(scenario.Number(seconds)) }

// printLoad prints the report as text.
func printLoad(out io.Writer, r *httpload.Report) error {
	interrupted := ""
	if r.Interrupted {
		interrupted = ", interrupted"
	}
	fmt.Fprintf(out, "%s: %s in %.1f s (%.1f/s), seed %d%s\n\n", strings.Join(r.URLs, " "),
		wording.Count(int(r.Requests), "request"), r.Seconds, r.Rate, r.Seed, interrupted)
	if err := printTimes(out, r); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if err := printOutcomes(out, r); err != nil {
		return err
	}
	if err := printServers(out, r); err != nil {
		return err
	}
	if err := printIntervals(out, r); err != nil {
		return err
	}
	fmt.Fprintf(out, "\n%s for requests, %.1f MB received, generator used %.0f%% of a core\n",
		wording.Count(int(r.Connections), "connection"), float64(r.Bytes)/1e6, 100*r.CPU)
	if r.Idle != (httpload.Idle{}) {
		fmt.Fprintf(out, "idle connections: %d open at the end, %d failed, %d lost\n",
			r.Idle.Open, r.Idle.Failed, r.Idle.Lost)
	}
	return nil
}

// timesColumns are the columns of a table of times.
var timesColumns = []struct {
	name  string
	value func(*httpload.Times) float64
}{
	{"mean", func(t *httpload.Times) float64 { return t.Mean }},
	{"deviation", func(t *httpload.Times) float64 { return t.Deviation }},
	{"min", func(t *httpload.Times) float64 { return t.Min }},
	{"p50", func(t *httpload.Times) float64 { return t.P50 }},
	{"p90", func(t *httpload.Times) float64 { return t.P90 }},
	{"p95", func(t *httpload.Times) float64 { return t.P95 }},
	{"p99", func(t *httpload.Times) float64 { return t.P99 }},
	{"p99.9", func(t *httpload.Times) float64 { return t.P999 }},
	{"max", func(t *httpload.Times) float64 { return t.Max }},
}

// printTimes prints the table of times.
func printTimes(out io.Writer, r *httpload.Report) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "ms\t")
	for _, column := range timesColumns {
		fmt.Fprint(w, column.name, "\t")
	}
	fmt.Fprintln(w)
	for _, row := range []struct {
		name  string
		times *httpload.Times
	}{
		{"latency", r.Latency}, {"exchange", r.Exchange},
		{"connect", r.Connect}, {"lateness", r.Lateness},
	} {
		fmt.Fprint(w, row.name, "\t")
		for _, column := range timesColumns {
			text := "-"
			if row.times != nil {
				text = inMilliseconds(column.value(row.times))
			}
			fmt.Fprint(w, text, "\t")
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// printOutcomes prints a line for each outcome that occurred, and for success in any case. The line
// of a failure has the first error. A share is a share of the requests with an outcome. So the line
// of the unfinished requests has no share.
func printOutcomes(out io.Writer, r *httpload.Report) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(name string, n uint64, example string) {
		if n > 0 || name == "succeeded" {
			share := 100 * float64(n) / float64(max(r.Succeeded+r.Failed, 1))
			text := fmt.Sprintf("%s\t%d\t%.2f%%\t%s", name, n, share, example)
			fmt.Fprintln(w, strings.TrimRight(text, "\t"))
		}
	}
	fmt.Fprintln(w, "outcome\trequests\tshare")
	line("succeeded", r.Succeeded, "")
	for _, kind := range slices.Sorted(maps.Keys(r.Failures)) {
		line(kind, r.Failures[kind], "first: "+r.Errors[kind])
	}
	if r.Unfinished > 0 {
		fmt.Fprintf(w, "unfinished\t%d\t-\n", r.Unfinished)
	}
	return w.Flush()
}

// printServers prints the table of servers, if any server has answered. Its shares are shares of
// all responses.
func printServers(out io.Writer, r *httpload.Report) error {
	if len(r.Servers) == 0 {
		return nil
	}
	all := uint64(0)
	for _, s := range r.Servers {
		all += s.Responses
	}
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "server\tresponses\tshare\tfailed\tmean ms\tp50\tp99")
	for _, s := range r.Servers {
		fmt.Fprintf(w, "%s\t%d\t%.1f%%\t%d\t%s\n", s.Name, s.Responses,
			100*float64(s.Responses)/float64(all), s.Failed,
			cells(s.Latency, "mean", "p50", "p99"))
	}
	return w.Flush()
}

// printIntervals prints the table of intervals, if the report has intervals.
func printIntervals(out io.Writer, r *httpload.Report) error {
	if len(r.Intervals) == 0 {
		return nil
	}
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "from s\tto s\trequests/s\tfailed\tmean ms\tp50\tp90\tp99\tmax")
	for _, at := range r.Intervals {
		fmt.Fprintf(w, "%v\t%v\t%.1f\t%d\t%s\n", at.From, at.To,
			float64(at.Requests)/(at.To-at.From), at.Failed,
			cells(at.Latency, "mean", "p50", "p90", "p99", "max"))
	}
	return w.Flush()
}

// cells returns the cells of t in the named columns of timesColumns, in milliseconds, separated by
// tabs. If t is nil, each cell is a dash.
func cells(t *httpload.Times, names ...string) string {
	var texts []string
	for _, name := range names {
		text := "-"
		for _, column := range timesColumns {
			if column.name == name && t != nil {
				text = inMilliseconds(column.value(t))
			}
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "\t")
}

// printLoadCSV prints a line of CSV for the run or, if intervals is true, for each interval. The
// line for the run has more columns.
func printLoadCSV(out io.Writer, r *httpload.Report, intervals bool) error {
	header := []string{"seed", "from", "to", "requests", "succeeded", "failed"}
	for _, column := range timesColumns {
		header = append(header, column.name)
	}
	kinds := slices.Sorted(maps.Keys(r.Failures))
	if !intervals {
		header = append(append(header, "unfinished", "cpu"), kinds...)
	}
	lines := [][]string{header}
	line := func(at *httpload.Interval) []string {
		fields := []string{strconv.FormatUint(r.Seed, 10), decimal(at.From), decimal(at.To)}
		for _, n := range []uint64{at.Requests, at.Succeeded, at.Failed} {
			fields = append(fields, strconv.FormatUint(n, 10))
		}
		for _, column := range timesColumns {
			text := ""
			if at.Latency != nil {
				text = decimal(column.value(at.Latency))
			}
			fields = append(fields, text)
		}
		return fields
	}
	for i := range r.Intervals {
		lines = append(lines, line(&r.Intervals[i]))
	}
	if !intervals {
		whole := line(&httpload.Interval{
			From: r.From, To: r.From + r.Seconds, Requests: r.Requests, Succeeded: r.Succeeded,
			Failed: r.Failed, Latency: r.Latency,
		})
		whole = append(whole, strconv.FormatUint(r.Unfinished, 10), decimal(r.CPU))
		for _, kind := range kinds {
			whole = append(whole, strconv.FormatUint(r.Failures[kind], 10))
		}
		lines = append(lines, whole)
	}
	return csv.NewWriter(out).WriteAll(lines)
}

// decimal formats a number of seconds, or a share, for CSV.
func decimal(x float64) string { return strconv.FormatFloat(x, 'g', 9, 64) }
