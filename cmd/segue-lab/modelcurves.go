// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/research/model"
)

// newModelCurves completes a command that compares all policies at one load. It adds the flags for
// the load, the policies and the servers. When the command runs, it checks these flags, and calls
// run with the load and the policies. run checks the other flags of the command.
func newModelCurves(
	f *modelFlags, cmd *cobra.Command,
	run func(cmd *cobra.Command, load float64, policies []policy) error,
) *cobra.Command {
	load := "88%"
	cmd.Args = cli.Arguments()
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		policies, err := f.policies()
		if err != nil {
			return err
		}
		loads, err := parseLoads("--load", load)
		if err != nil {
			return err
		}
		return run(cmd, loads[0], policies)
	}
	f.addTo(cmd)
	cmd.Flags().StringVar(&load, "load", load,
		"load: `share` of the cores that is busy on average in the steady state")
	return cmd
}

// printCurves prints a table with a line for each time and a column for each policy. value returns
// the text of a cell. first is the title of the column of times. The title of a policy's column is
// prefix followed by the policy's name.
func printCurves(
	out io.Writer, first, prefix string, policies []policy, times []float64,
	value func(line int, policy string) string,
) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "%s\t", first)
	for _, p := range policies {
		fmt.Fprintf(w, "%s%s\t", prefix, p.name)
	}
	fmt.Fprintln(w)
	for i, t := range times {
		fmt.Fprintf(w, "%s\t", duration(t))
		for _, p := range policies {
			fmt.Fprintf(w, "%s\t", value(i, p.name))
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

func newModelDistribution(f *modelFlags) *cobra.Command {
	to, points := time.Duration(0), 20
	cmd := newModelCurves(f, &cobra.Command{
		Use:   "distribution",
		Short: "Compute the distribution of response times",
	}, func(cmd *cobra.Command, load float64, policies []policy) error {
		if points < 1 || points > 10000 {
			return fmt.Errorf("--points %d: must be from 1 to 10000", points)
		}
		if to < 0 {
			return fmt.Errorf("--to %v: must not be negative", to)
		}
		return f.distribution(cmd.OutOrStdout(), load, policies, to, points)
	})
	cmd.Flags().DurationVar(&to, "to", 0,
		"longest `duration` in the output; 0 means the 99th percentile of SC")
	cmd.Flags().IntVar(&points, "points", points,
		"`count` of durations in the output, at equal intervals")
	return cmd
}

// distributionRow has the share of flows that take at most Time, by policy.
type distributionRow struct {
	Time  float64            `json:"time_seconds"`
	Share map[string]float64 `json:"share"`
}

// distribution prints, for each policy, the share of response times that do not exceed a time. The
// number of times is points. They are at equal intervals up to end. If end is 0, the last one is
// the 99th percentile under single choice, which is policies[0].
func (f *modelFlags) distribution(
	out io.Writer, load float64, policies []policy, end time.Duration, points int,
) error {
	states := make([]*model.Steady, len(policies))
	for i, p := range policies {
		var err error
		if states[i], err = p.steady(load, f.cores); err != nil {
			return err
		}
	}
	longest := end.Seconds() / f.service.Seconds()
	if end == 0 {
		var err error
		if longest, err = states[0].Percentile(99); err != nil {
			return err
		}
	}
	rows, times := make([]distributionRow, points), make([]float64, points)
	for i := range rows {
		t := longest * float64(i+1) / float64(points)
		times[i] = f.seconds(t)
		rows[i] = distributionRow{times[i], make(map[string]float64)}
		for j, p := range policies {
			rows[i].Share[p.name] = states[j].CDF(t)
		}
	}
	if f.asJSON {
		return cli.PrintJSON(out, rows)
	}
	share := func(line int, policy string) string { return percentage(rows[line].Share[policy]) }
	return printCurves(out, "no longer than", "", policies, times, share)
}

// mostServiceTimes is the longest --to of command transient, as a multiple of --service.
const mostServiceTimes = 1_000_000

func newModelTransient(f *modelFlags) *cobra.Command {
	to, step, flows := 20*time.Second, time.Second, 0
	cmd := newModelCurves(f, &cobra.Command{
		Use:   "transient",
		Short: "Compute how servers reach the steady state",
	}, func(cmd *cobra.Command, load float64, policies []policy) error {
		if step <= 0 || to < step || to/step > 10000 {
			return fmt.Errorf("--step %v: must be above 0, at most --to %v, and at least 1/10000 of that",
				step, to)
		}
		if to/mostServiceTimes > f.service {
			return fmt.Errorf("--to %v: must be at most %d times --service %v",
				to, mostServiceTimes, f.service)
		}
		if flows < 0 || flows > model.MaxThreshold {
			return fmt.Errorf("--flows %d: must be from 0 to %d", flows, model.MaxThreshold)
		}
		return f.transient(cmd.Context(), cmd.OutOrStdout(), load, policies, flows, step, to)
	})
	cmd.Flags().IntVar(&flows, "flows", flows,
		"`count` of flows that each server has at the beginning")
	cmd.Flags().DurationVar(&to, "to", to, "`duration` after which the computation stops")
	cmd.Flags().DurationVar(&step, "step", step, "`duration` between two lines of the output")
	return cmd
}

// transientRow has the mean number of flows of a server at Time, by policy.
type transientRow struct {
	Time  float64            `json:"time_seconds"`
	Flows map[string]float64 `json:"flows"`
}

// transient prints the mean number of flows of a server under each policy, at time 0 and after each
// step until end. At time 0 each server has the given number of flows.
func (f *modelFlags) transient(
	ctx context.Context, out io.Writer, load float64, policies []policy, flows int,
	step, end time.Duration,
) error {
	systems := make([]*model.Transient, len(policies))
	for i, p := range policies {
		var err error
		if systems[i], err = model.NewTransient(load, f.cores, p.threshold, flows); err != nil {
			return err
		}
	}
	var rows []transientRow
	var times []float64
	for now := time.Duration(0); now <= end; now += step {
		row := transientRow{now.Seconds(), make(map[string]float64)}
		for i, p := range policies {
			row.Flows[p.name] = systems[i].MeanFlows()
			if err := systems[i].Advance(ctx, step.Seconds()/f.service.Seconds()); err != nil {
				return err
			}
		}
		rows, times = append(rows, row), append(times, row.Time)
	}
	if f.asJSON {
		return cli.PrintJSON(out, rows)
	}
	mean := func(line int, policy string) string {
		return fmt.Sprintf("%.4f", rows[line].Flows[policy])
	}
	return printCurves(out, "time", "flows, ", policies, times, mean)
}
