// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/research/sim/scenario"
)

// simFlags has the values of the flags. If seed or runs is not given, the value in the scenario's
// file applies.
type simFlags struct {
	seed           uint64
	runs, parallel int
	every          time.Duration
	asJSON, asCSV  bool
}

func newSim() *cobra.Command {
	var f simFlags
	cmd := &cobra.Command{
		Use:   "sim FILE...",
		Short: "Simulate load balancing",
		Long: `Sim simulates the scenarios in the files. A scenario describes servers, balancers and
their placement, arrivals, jobs, and events such as a server's failure.
docs/research/simulator.md explains the files.

All cases of a scenario get the same flows. The result depends only on the file and
the seed. A value after ± is half the width of a 95% confidence interval. The interval
follows from the differences of the runs or, if there is only one run, of batches of its
flows.

--every 10s also shows the results over time: for the flows that arrived in each 10 s,
and for the servers in that time.

The exit code is 0 if every assertion has the result that its file expects.

--json prints an array with one object per file. --csv prints one line per case or,
with --every, per interval. Times are in seconds.`,
		Example: "  segue-lab sim --runs 10 docs/examples/sim/placement-hunt.yaml\n" +
			"  segue-lab sim --every 5s --csv docs/examples/sim/failures.yaml",
		Args: cli.Arguments("FILE..."),
		RunE: func(cmd *cobra.Command, files []string) error {
			return f.simulate(cmd, files)
		},
	}
	cmd.Flags().Uint64Var(&f.seed, "seed", 0,
		"`number` that seeds all random numbers, instead of the file's seed")
	cmd.Flags().IntVar(&f.runs, "runs", 0, "`count` of runs of each case, instead of the file's count")
	cmd.Flags().IntVar(&f.parallel, "parallel", 0,
		"`count` of runs at the same time; 0 means one for each core")
	cmd.Flags().DurationVar(&f.every, "every", 0,
		"also show the results of each interval of this `duration`")
	cmd.Flags().BoolVar(&f.asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&f.asCSV, "csv", false, "print CSV")
	cmd.MarkFlagsMutuallyExclusive("json", "csv")
	return cmd
}

// simulate checks the flags, runs the scenarios in the files, and prints the reports.
func (f *simFlags) simulate(cmd *cobra.Command, files []string) error {
	if cmd.Flags().Changed("runs") && (f.runs < 1 || f.runs > scenario.MostRuns) {
		return fmt.Errorf("--runs %d: must be from 1 to %d", f.runs, scenario.MostRuns)
	}
	if f.parallel < 0 {
		return fmt.Errorf("--parallel %d: must not be negative", f.parallel)
	}
	if cmd.Flags().Changed("every") && f.every < time.Millisecond {
		return fmt.Errorf("--every %v: must be at least 1ms", f.every)
	}
	scenarios, err := loadScenarios(files)
	if err != nil {
		return err
	}
	reports, err := f.runAll(cmd, scenarios)
	if len(reports) == 0 {
		return err
	}
	// After an error or an interruption, print the reports that there are.
	return errors.Join(f.print(cmd.OutOrStdout(), reports), unexpected(reports), err)
}

// runAll runs the scenarios one after the other, and prints their warnings. If a scenario fails or
// is interrupted, runAll returns the error, and the reports of the scenarios before it.
func (f *simFlags) runAll(
	cmd *cobra.Command, scenarios []*scenario.Scenario,
) (reports []*scenario.Report, err error) {
	for _, s := range scenarios {
		if cmd.Flags().Changed("seed") {
			s.Seed = f.seed
		}
		if f.runs > 0 {
			s.Runs = f.runs
		}
		s.Every = f.every
		report, err := s.Run(cmd.Context(), f.parallel, simProgress(cmd.ErrOrStderr(), s.Name))
		if err != nil {
			return reports, fmt.Errorf("%s: %w", s.Name, err)
		}
		for _, warning := range report.Warnings {
			fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s: %s\n", s.Name, warning)
		}
		reports = append(reports, report)
	}
	return reports, nil
}

// loadScenarios reads the scenarios in all files. It reads further files even if one has an error,
// so that the returned error contains the errors of all files.
func loadScenarios(files []string) ([]*scenario.Scenario, error) {
	var scenarios []*scenario.Scenario
	var errs []error
	for _, file := range files {
		s, err := scenario.Load(file)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		scenarios = append(scenarios, s)
	}
	return scenarios, errors.Join(errs...)
}

// simProgress returns a function that prints the number of finished runs of a scenario. It returns
// nil if out is not a terminal.
func simProgress(out io.Writer, name string) func(done, total int) {
	write := progressTo(out, false)
	if write == nil {
		return nil
	}
	return func(done, total int) {
		write(fmt.Sprintf("%s: %d of %s", name, done, wording.Count(total, "run")))
	}
}

func (f *simFlags) print(out io.Writer, reports []*scenario.Report) error {
	switch {
	case f.asJSON:
		return cli.PrintJSON(out, reports)
	case f.asCSV:
		return f.printCSV(out, reports)
	}
	for i, r := range reports {
		if i > 0 {
			fmt.Fprintln(out)
		}
		if err := printSim(out, r); err != nil {
			return err
		}
	}
	return nil
}

// unexpected returns an error if an assertion does not have the result that its file expects.
func unexpected(reports []*scenario.Report) error {
	n := 0
	for _, r := range reports {
		for i := range r.Assertions {
			if !r.Assertions[i].OK() {
				n++
			}
		}
	}
	if n > 0 {
		return fmt.Errorf("%s not as expected", wording.Count(n, "assertion"))
	}
	return nil
}

// printSim prints a table of the cases of a scenario, the assertions, and the intervals.
func printSim(out io.Writer, r *scenario.Report) error {
	fmt.Fprintf(out, "%s: %s, seed %d\n", r.Scenario, wording.Count(r.Runs, "run"), r.Seed)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "case\tflows\tmean ms\t±\tp50\tp90\tp99\tfailed\tutilisation\tfairness\thops\t"+
		"wrongful\t")
	for _, c := range r.Cases {
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", c.Name, c.Flows,
			milliseconds(c.Mean.Value), milliseconds(c.Mean.Half),
			milliseconds(c.P50.Value), milliseconds(c.P90.Value), milliseconds(c.P99.Value),
			cell("%.2f%%", 100*c.Failed.Value), cell("%.1f%%", 100*c.Utilisation.Value),
			cell("%.3f", c.Fairness.Value), cell("%.3f", c.Hops.Value),
			cell("%.2f%%", 100*c.Wrongful.Value))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i := range r.Assertions {
		fmt.Fprintln(out, verdictLine(&r.Assertions[i]))
	}
	for i := range r.Cases {
		if err := printSeries(out, r, &r.Cases[i]); err != nil {
			return err
		}
	}
	return nil
}

// printSeries prints a table of the intervals of a case, if it has any.
func printSeries(out io.Writer, r *scenario.Report, c *scenario.CaseReport) error {
	if len(c.Series) == 0 {
		return nil
	}
	fmt.Fprintf(out, "\n%s, %s over time\n", r.Scenario, c.Name)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "from s\tto s\tflows/s\tmean ms\t±\tp50\tp90\tp99\tfailed\tutilisation\topen\t"+
		"instant-fairness\thops\t")
	for _, at := range c.Series {
		fmt.Fprintf(w, "%v\t%v\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", at.From, at.To,
			cell("%.1f", at.Arrivals.Value),
			milliseconds(at.Mean.Value), milliseconds(at.Mean.Half),
			milliseconds(at.P50.Value), milliseconds(at.P90.Value), milliseconds(at.P99.Value),
			cell("%.2f%%", 100*at.Failed.Value), cell("%.1f%%", 100*at.Utilisation.Value),
			cell("%.2f", at.Open.Value), cell("%.3f", at.InstantFairness.Value),
			cell("%.3f", at.Hops.Value))
	}
	return w.Flush()
}

// cell formats a number for a table. If the number is undefined, such as a share of no flows, it
// returns a dash.
func cell(format string, n scenario.Number) string {
	if math.IsNaN(float64(n)) {
		return "-"
	}
	return fmt.Sprintf(format, n)
}

// milliseconds formats a number of seconds in milliseconds, with three significant digits. It shows
// all digits before the decimal point, and at most four after it. If the number is undefined, it
// returns a dash.
func milliseconds(seconds scenario.Number) string {
	ms := float64(seconds) * 1000
	if math.IsNaN(ms) {
		return "-"
	}
	const significant, least = 3, 0.01 // a time below least has the digits of least
	magnitude := int(math.Floor(math.Log10(max(ms, least))))
	return strconv.FormatFloat(ms, 'f', max(0, significant-1-magnitude), 64)
}

// verdictLine returns a line about an assertion: whether it holds, fails or is undefined, and
// whether the file expects this result.
func verdictLine(v *scenario.Verdict) string {
	verdict := "holds"
	switch {
	case !v.Defined:
		verdict = "undefined"
	case !v.Holds:
		verdict = "fails"
	}
	expected := "as expected"
	if !v.OK() {
		expected = "NOT as expected"
	}
	return fmt.Sprintf("%s, %s: %s (%s)", verdict, expected, v.Condition, v.Values)
}

// printCSV prints a line of CSV for each case or, with --every, for each interval of each case.
func (f *simFlags) printCSV(out io.Writer, reports []*scenario.Report) error {
	w := csv.NewWriter(out)
	header := []string{"scenario", "case", "seed", "runs", "flows"}
	if f.every > 0 {
		header = append(header, "from", "to", "arrivals", "arrivals_half_width")
	}
	for _, column := range (&scenario.Quantities{}).Columns() {
		header = append(header, column.Name, column.Name+"_half_width")
	}
	lines := [][]string{header}
	for _, r := range reports {
		for i := range r.Cases {
			c := &r.Cases[i]
			line := func(flows uint64, more ...string) []string {
				return append([]string{
					r.Scenario, c.Name, strconv.FormatUint(r.Seed, 10), strconv.Itoa(r.Runs),
					strconv.FormatUint(flows, 10),
				}, more...)
			}
			if f.every == 0 {
				lines = append(lines, withColumns(line(c.Flows), &c.Quantities))
			}
			for j := range c.Series {
				at := &c.Series[j]
				lines = append(lines, withColumns(line(at.Flows, at.From.String(), at.To.String(),
					at.Arrivals.Value.String(), at.Arrivals.Half.String()), &at.Quantities))
			}
		}
	}
	return w.WriteAll(lines)
}

// withColumns appends the values and half widths of all quantities to a line of CSV.
func withColumns(line []string, q *scenario.Quantities) []string {
	for _, column := range q.Columns() {
		line = append(line, column.Estimate.Value.String(), column.Estimate.Half.String())
	}
	return line
}
