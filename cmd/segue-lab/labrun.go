// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/research/testbed"
)

func newLabRun() *cobra.Command {
	var o testbed.Options
	var set string
	var list, all, asJSON, loud bool
	cmd := &cobra.Command{
		Use:   "run EXPERIMENT...",
		Short: "Run experiments on real packets",
		Long: `Run makes the runs of an experiment: it builds a lab with emulated servers, sends
requests through the balancers, and replays the same requests in the simulator. An
EXPERIMENT is a name that --list shows, or a file. The results are in the directory
testbed/EXPERIMENT. segue-lab lab report makes a page of them. docs/research/testbed.md
describes the files and the results.

The results of a run are written when it has ended. After an interruption, the same
command continues with the runs that are missing. When the command ends, its lab is
removed, even if the command is killed.

An experiment runs faster than real time: at --speed 4, servers work four times as fast,
and requests arrive four times as often. All results are in emulated time.

--json prints an array of objects with the keys experiment, case, point, rho, balancers,
seeds, mean_ms, p50_ms, p90_ms, p99_ms, half_width_ms and p50_half_width_ms to
p99_half_width_ms (half of a 95% confidence interval over the seeds), failed,
connections, simulated_mean_ms, bound_mean_ms (of an omniscient balancer), model_mean_ms
and warnings. With --list it prints an object with the key experiments. Their keys are
experiment, minutes, set, paper, content and needs.`,
		Example: "  segue-lab lab run --list\n  segue-lab lab run policies-quick\n" +
			"  segue-lab lab run --all\n" +
			"  segue-lab lab run --set least\n  segue-lab lab run 6lb-10 --full\n" +
			"  segue-lab lab run hlb-trace --trace rate_350.csv",
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("speed") && !(o.Speed > 0) {
				return fmt.Errorf("--speed %v: must be a positive number", o.Speed)
			}
			if cmd.Flags().Changed("seeds") && o.Seeds < 1 {
				return fmt.Errorf("--seeds %d: must be at least 1", o.Seeds)
			}
			if o.MostLate < 0 {
				return fmt.Errorf("--repeat-late %s: must not be negative", o.MostLate)
			}
			if all { // the same as --set papers
				set = string(testbed.SetPapers)
			}
			if (list || set != "") && len(args) > 0 {
				return fmt.Errorf("%s: --list, --all and --set take no names of experiments", args[0])
			}
			if list {
				return listExperiments(cmd.OutOrStdout(), o, asJSON)
			}
			if set != "" {
				var err error
				if args, err = experimentsOf(testbed.Set(set), cmd.ErrOrStderr(), o); err != nil {
					return err
				}
			}
			if len(args) == 0 {
				return errors.New("missing EXPERIMENT: the name of an experiment or a file; " +
					"--list shows the names")
			}
			if o.Directory != "" && len(args) > 1 {
				return errors.New("--out: each experiment needs its own directory; name one experiment")
			}
			o.Progress = progressTo(cmd.ErrOrStderr(), loud)
			return runExperiments(cmd.Context(), cmd.OutOrStdout(), args, o, asJSON)
		},
	}
	cmd.Flags().BoolVar(&list, "list", false, "list the experiments, and how long each takes")
	cmd.Flags().StringVar(&set, "set", "",
		"run all experiments of a set that need nothing else; the `name` is papers, least, infer or hlb")
	cmd.Flags().BoolVar(&all, "all", false, "the same as --set papers")
	cmd.MarkFlagsMutuallyExclusive("list", "all", "set")
	cmd.Flags().BoolVar(&o.Full, "full", false,
		"use the values in the section full of the experiment's file, such as the paper's number of "+
			"requests; takes hours")
	cmd.Flags().Float64Var(&o.Speed, "speed", 0,
		"how many times faster than real time the experiment runs, a `number` (default: the "+
			"experiment's)")
	cmd.Flags().IntVar(&o.Seeds, "seeds", 0,
		"`count` of runs of each case at each point (default: the experiment's)")
	cmd.Flags().DurationVar(&o.MostLate, "repeat-late", 0,
		"repeat a run, at most nine times, if 1% of the requests were sent later than this `time`, or if "+
			"less than 10% of the CPU time was left")
	cmd.Flags().StringVarP(&o.Directory, "out", "o", "",
		"`folder` for the results (default: testbed/EXPERIMENT)")
	cmd.Flags().StringVar(&o.Trace, "trace", "",
		"`file` with the requests, for experiments that replay a trace")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&loud, "progress", false, progressHelp)
	return cmd
}

// experimentsOf returns the names of the experiments of a set that need no further input, such as a
// trace. It prints which experiments of the set it leaves out, and why.
func experimentsOf(set testbed.Set, out io.Writer, o testbed.Options) ([]string, error) {
	if !slices.Contains(testbed.Sets(), set) {
		return nil, fmt.Errorf("--set %s: must be papers, least, infer or hlb", set)
	}
	ready, others, err := testbed.Ready(set, o)
	if err != nil {
		return nil, err
	}
	for _, why := range others {
		fmt.Fprintln(out, "left out:", why)
	}
	if len(ready) == 0 {
		return nil, fmt.Errorf("no experiment of the set %s can run with the other flags", set)
	}
	return ready, nil
}

// listedExperiment is an experiment in a list. Minutes is nil if the experiment cannot run with the
// other flags.
type listedExperiment struct {
	Name    string      `json:"experiment"`
	Minutes *float64    `json:"minutes"`
	Set     testbed.Set `json:"set"`
	Paper   string      `json:"paper"`
	Title   string      `json:"content"`
	Needs   string      `json:"needs"`
}

// listExperiments prints all experiments, and how long each of them takes with the options. As
// text, it also prints how long each set takes. An experiment counts for its set if it can run with
// the options and needs no further input.
func listExperiments(out io.Writer, o testbed.Options, asJSON bool) error {
	all := []listedExperiment{}
	total := map[testbed.Set]time.Duration{}
	for _, name := range testbed.Names() {
		e, _, err := testbed.Load(name)
		if err != nil {
			return err
		}
		listed := listedExperiment{
			Name: name, Set: e.Set, Paper: e.Paper, Title: e.Title, Needs: e.Needs,
		}
		if e.Check(o) == nil { // the experiment can run
			listed.Minutes = new(e.Duration(o).Minutes())
			if e.Needs == "" {
				total[e.Set] += e.Duration(o)
			}
		}
		all = append(all, listed)
	}
	if asJSON {
		return cli.PrintJSON(out, map[string][]listedExperiment{"experiments": all})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "experiment\ttime\tset\tpaper\tcontent\tneeds")
	for _, e := range all {
		takes := "-"
		if e.Minutes != nil {
			takes = inMinutes(*e.Minutes)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", e.Name, takes, e.Set, e.Paper, e.Title, e.Needs)
	}
	for _, set := range testbed.Sets() {
		fmt.Fprintf(w, "--set %s\t%s\t%s\t\tall that need nothing\t\n",
			set, inMinutes(total[set].Minutes()), set)
	}
	return w.Flush()
}

// inMinutes formats a duration in minutes or, if it is more than three hours, in hours.
func inMinutes(minutes float64) string {
	if minutes > 3*60 {
		return fmt.Sprintf("%.0f h", math.Ceil(minutes/60))
	}
	return fmt.Sprintf("%.0f min", math.Ceil(minutes))
}

// runExperiments runs experiments one after the other. It prints the results of each experiment
// when it has ended or, as JSON, those of all experiments at the end. It stops at the first error,
// and then prints no JSON.
func runExperiments(
	ctx context.Context, out io.Writer, names []string, o testbed.Options, asJSON bool,
) error {
	rows := []experimentRow{}
	for _, name := range names {
		e, text, err := testbed.Load(name)
		if err != nil {
			return err
		}
		own := o
		if own.Directory == "" {
			own.Directory = filepath.Join("testbed", e.Name)
		}
		results, err := e.Run(ctx, text, own)
		if err != nil {
			if results != nil && len(results.Runs) > 0 {
				err = fmt.Errorf("%w\n%d of %d runs are in %s; the same command continues with the others",
					err, len(results.Runs), results.Planned, own.Directory)
			}
			return err
		}
		if asJSON {
			rows = append(rows, rowsOf(results)...)
		} else if err := printResults(out, results, own.Directory); err != nil {
			return err
		}
	}
	if asJSON {
		return cli.PrintJSON(out, rows)
	}
	return nil
}

// experimentRow has what --json prints about a case at a point. Times are in milliseconds of
// emulated time. Times that are not known are nil.
type experimentRow struct {
	Experiment    string   `json:"experiment"`
	Case          string   `json:"case"`
	Point         float64  `json:"point"`
	Rho           float64  `json:"rho"`
	Balancers     int      `json:"balancers"`
	Seeds         int      `json:"seeds"`
	Mean          float64  `json:"mean_ms"`
	P50           float64  `json:"p50_ms"`
	P90           float64  `json:"p90_ms"`
	P99           float64  `json:"p99_ms"`
	Half          *float64 `json:"half_width_ms"`
	HalfP50       *float64 `json:"p50_half_width_ms"`
	HalfP90       *float64 `json:"p90_half_width_ms"`
	HalfP99       *float64 `json:"p99_half_width_ms"`
	Failed        uint64   `json:"failed"`
	Connections   uint64   `json:"connections"`
	SimulatedMean *float64 `json:"simulated_mean_ms"`
	BoundMean     *float64 `json:"bound_mean_ms"`
	ModelMean     *float64 `json:"model_mean_ms"`
	Warnings      []string `json:"warnings"`
}

// rowsOf returns a row for each case at each point. It leaves out those without results.
func rowsOf(r *testbed.Results) (rows []experimentRow) {
	for _, name := range r.Cases {
		for _, point := range r.Points {
			s := r.Summarise(name, point)
			if s == nil {
				continue
			}
			row := experimentRow{
				Experiment: r.Experiment, Case: name, Point: point, Rho: s.Load, Balancers: s.Balancers,
				Seeds: s.Seeds, Mean: 1e3 * s.Measured.Mean,
				P50: 1e3 * s.Measured.P50, P90: 1e3 * s.Measured.P90, P99: 1e3 * s.Measured.P99,
				Failed: s.Failed, Connections: s.Requests, Warnings: s.Warnings,
			}
			if half := s.Half; half != nil {
				row.Half, row.HalfP50 = new(1e3*half.Mean), new(1e3*half.P50)
				row.HalfP90, row.HalfP99 = new(1e3*half.P90), new(1e3*half.P99)
			}
			if s.Simulated != nil {
				row.SimulatedMean = new(1e3 * s.Simulated.Mean)
			}
			if s.Bound != nil {
				row.BoundMean = new(1e3 * s.Bound.Mean)
			}
			if s.Model != nil {
				row.ModelMean = new(1e3 * s.Model.Mean)
			}
			rows = append(rows, row)
		}
	}
	return rows
}

// printResults prints the results of an experiment: the table for experiments of its kind, the
// order of the cases, the paper's claims, and warnings. directory is where the results are stored.
func printResults(out io.Writer, r *testbed.Results, directory string) error {
	fmt.Fprintf(out, "%s: %s (%s)\n\n", r.Experiment, r.Title, wording.Count(len(r.Runs), "run"))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	switch r.Kind {
	case testbed.KindChange:
		printChanges(w, r)
	case testbed.KindHold:
		printHeld(w, r)
	case testbed.KindForward:
		printForwarding(w, r)
	default:
		printResponses(w, r)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	if r.HasCPU() {
		if err := printCosts(out, r); err != nil {
			return err
		}
	}
	printOrder(out, r)
	for _, c := range r.Claims {
		printClaim(out, c)
	}
	for _, run := range r.Runs {
		for _, warning := range run.Warnings {
			fmt.Fprintf(out, "warning: %s, %s %v, seed %d: %s\n",
				run.Case, r.Axis.Key, run.Point, run.Seed, warning)
		}
	}
	_, err := fmt.Fprintf(out, "The results are in %[1]s. Next: %[2]s lab report %[1]s\n",
		directory, cli.Program(programName))
	return err
}

// printResponses prints the response times of each case at each point.
func printResponses(w io.Writer, r *testbed.Results) {
	fmt.Fprintf(w, "case\t%s\tmean ms\t±\tp50\tp90\t±\tp99\t±\tfailed\tsimulated mean\t"+
		"omniscient mean\tmodel mean\t\n", r.Axis.Key)
	optional := func(v *float64) string {
		if v == nil {
			return "-"
		}
		return fmt.Sprintf("%.0f", *v)
	}
	for _, row := range rowsOf(r) {
		fmt.Fprintf(w, "%s\t%v\t%.0f\t%s\t%.0f\t%.0f\t%s\t%.0f\t%s\t%d\t%s\t%s\t%s\t\n",
			row.Case, row.Point,
			row.Mean, optional(row.Half), row.P50, row.P90, optional(row.HalfP90),
			row.P99, optional(row.HalfP99), row.Failed,
			optional(row.SimulatedMean), optional(row.BoundMean), optional(row.ModelMean))
	}
}

// printCosts prints the CPU time of a request and the memory of the balancers, in each case at each
// point.
func printCosts(out io.Writer, r *testbed.Results) error {
	fmt.Fprintln(out, "CPU time of a request, µs by the clock, and memory of the balancers, MiB:")
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "case\t%s\t", r.Axis.Key)
	for _, cost := range testbed.Costs {
		fmt.Fprintf(w, "%s\t±\t", cost.Name)
	}
	fmt.Fprintln(w)
	for _, name := range r.Cases {
		for _, point := range r.Points {
			fmt.Fprintf(w, "%s\t%v\t", name, point)
			for _, cost := range testbed.Costs {
				e := cost.Estimate(r, name, point)
				fmt.Fprintf(w, "%s\t%s\t", known("%.1f", e.Value), known("%.1f", e.Half))
			}
			fmt.Fprintln(w)
		}
	}
	fmt.Fprintln(w)
	return w.Flush()
}

// known formats a value, or returns a dash if it is not known.
func known(format string, v float64) string {
	if math.IsNaN(v) {
		return "-"
	}
	return fmt.Sprintf(format, v)
}

// printOrder prints the order of the cases at each point, from the shortest mean to the longest. It
// prints nothing if the experiment does not compare times.
func printOrder(out io.Writer, r *testbed.Results) {
	if !r.ComparesTimes() {
		return
	}
	for _, point := range r.Points {
		steps := r.Order(point)
		if len(steps) == 0 {
			continue
		}
		fmt.Fprintf(out, "order by the mean, %s %v:\n", r.Axis.Key, point)
		for _, s := range steps {
			fmt.Fprintf(out, "  %s\n", s)
		}
	}
	fmt.Fprintln(out)
}

// printChanges prints how many connections broke when servers were removed. One column counts those
// whose own server was removed, and another one all other broken connections.
func printChanges(w io.Writer, r *testbed.Results) {
	fmt.Fprintf(w, "case\t%s\tconnections\tserver removed\tbroken besides\tshare\t\n", r.Axis.Key)
	for _, name := range r.Cases {
		for _, point := range r.Points {
			s := r.Summarise(name, point)
			if s == nil {
				continue
			}
			removed := s.Failures[testbed.ServerRemoved]
			fmt.Fprintf(w, "%s\t%v\t%d\t%d\t%d\t%.2f%%\t\n", name, point, s.Requests, removed, s.Failed,
				100*float64(s.Failed)/float64(s.Requests))
		}
	}
}

// printHeld prints how evenly the servers share the open connections.
func printHeld(w io.Writer, r *testbed.Results) {
	fmt.Fprintln(w, "case\tconnections\ton each server\tfurthest from even\tbroken\t")
	for _, name := range r.Cases {
		for _, point := range r.Points {
			s := r.Summarise(name, point)
			if s == nil {
				continue
			}
			fmt.Fprintf(w, "%s\t%v\t%d to %d\t%.1f\t%d\t\n",
				name, point, s.Fewest, s.Most, s.FromEven, s.Failed)
		}
	}
}

// printForwarding prints the CPU time and the CPU cycles of a packet in each case, and how many packets a core can
// forward in a second.
func printForwarding(w io.Writer, r *testbed.Results) {
	fmt.Fprintf(w, "case\t%s\tns per packet\tcycles\tMpackets/s of a core\trelative to %s\t\n",
		r.Axis.Key, r.Cases[0])
	for _, name := range r.Cases {
		for _, point := range r.Points {
			s, first := r.Summarise(name, point), r.Summarise(r.Cases[0], point)
			cycles := known("%.0f", r.Estimate("cycles", name, point).Value)
			if s != nil && first != nil {
				fmt.Fprintf(w, "%s\t%.0f\t%.1f\t%s\t%.2f\t%+.1f%%\t\n", name, point, 1e9*s.Measured.Mean,
					cycles, 1e-6/s.Measured.Mean, 100*(first.Measured.Mean/s.Measured.Mean-1))
			}
		}
	}
}

// comparePlacements runs the experiment demo, which compares placements hash and hunt. First it
// prints to progress how long that takes. It keeps no files.
func comparePlacements(
	ctx context.Context, progress io.Writer,
) (*testbed.Experiment, []experimentRow, error) {
	e, text, err := testbed.Load("demo")
	if err != nil {
		return nil, nil, err
	}
	directory, err := os.MkdirTemp("", "segue-demo")
	if err != nil {
		return nil, nil, err
	}
	defer os.RemoveAll(directory)
	fmt.Fprintf(progress, "Sending %d requests to %d busy servers by each placement: about %s.\n",
		e.Connections, e.Servers, e.Duration(testbed.Options{}).Round(5*time.Second))
	r, err := e.Run(ctx, text, testbed.Options{Directory: directory})
	if err != nil {
		return nil, nil, err
	}
	return e, rowsOf(r), nil
}

// showPlacements compares placements, and prints a table of the results.
func showPlacements(cmd *cobra.Command) error {
	out := cmd.OutOrStdout()
	e, rows, err := comparePlacements(cmd.Context(), out)
	if err != nil {
		return err
	}
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "placement\tmean ms\tp99 ms\tfailed")
	for _, row := range rows {
		fmt.Fprintf(w, "%s\t%.0f\t%.0f\t%d\n", row.Case, row.Mean, row.P99, row.Failed)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "\nThe servers have 2 emulated processors each, at a load of %v. "+
		"Both placements got the same requests.\n", e.Load)
	return err
}

// printClaim prints a claim. If something was measured for the claim, it also prints whether the
// results meet it. For a claim that is never judged, and for one whose quantity the runs do not have,
// it prints the reason.
func printClaim(out io.Writer, c testbed.Claim) {
	fmt.Fprintf(out, "claim: %s\n", c.Text)
	if c.Quantity == "" {
		fmt.Fprintf(out, "  %s\n", c.Condition)
	}
	if c.Uncounted != "" {
		fmt.Fprintf(out, "  %s is not judged: %s\n", c.Condition, c.Uncounted)
	}
	if c.Measured == nil {
		return
	}
	verdict := "is not judged"
	switch {
	case c.Met == nil: // one seed, for example
	case *c.Met:
		verdict = "is met"
	default:
		verdict = "is not met"
	}
	fmt.Fprintf(out, "  %s %s: %.3g", c.Condition, verdict, *c.Measured)
	if c.Simulated != nil {
		fmt.Fprintf(out, " (simulated: %.3g)", *c.Simulated)
	}
	fmt.Fprintln(out)
}

// newLabGuard returns the command that an experiment runs in a process beside its own. The guard's
// standard input is a pipe from the experiment's process, and ends with that process. Then the
// guard removes the lab.
func newLabGuard() *cobra.Command {
	return &cobra.Command{
		Use:    "guard LAB",
		Short:  "Remove a lab when standard input ends",
		Hidden: true,
		Args:   cli.Arguments("LAB"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return testbed.Guard(args[0], cmd.InOrStdin())
		},
	}
}
