// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/version"
	"github.com/segue-lb/segue/lab/bench"
)

// againstFlag is the name of the flag for the executable with which this build is compared.
const againstFlag = "against"

// newBenchWorker returns the command that a comparison of two builds runs in each of them.
func newBenchWorker() *cobra.Command {
	return &cobra.Command{
		Use:    "worker",
		Short:  "Measure cases of this build one at a time, as standard input asks",
		Hidden: true,
		Args:   cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return bench.ServeWorker(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
}

// compareBuilds compares this build with the build in the executable old, and prints the result. If
// --flows, --rounds or --packets is not given, it uses the default for comparisons instead of the
// value in o.
func compareBuilds(cmd *cobra.Command, o bench.PacketOptions, old string, asJSON bool) error {
	if old == "" {
		return errors.New("--against: missing the executable")
	}
	defaults := bench.DefaultCompareOptions()
	if !cmd.Flags().Changed("flows") {
		o.Flows = defaults.Flows
	}
	if !cmd.Flags().Changed("rounds") {
		o.Rounds = defaults.Rounds
	}
	if !cmd.Flags().Changed("packets") {
		o.Packets = defaults.Packets
	}
	comparison, err := bench.Compare(cmd.Context(), bench.CompareOptions{PacketOptions: o, Old: old})
	if err != nil {
		return fmt.Errorf("--against %s: %w", old, err)
	}
	if asJSON {
		return cli.PrintJSON(cmd.OutOrStdout(), comparison)
	}
	return printComparison(cmd.OutOrStdout(), comparison)
}

// printComparison prints a table of the cases that both builds have, and lists the other cases.
func printComparison(out io.Writer, c *bench.Comparison) error {
	fmt.Fprintf(out, "old: %s\nnew: %s\n\n", describeBuild(c.Old), describeBuild(c.New))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "case\tfamily\tencapsulation\tflows\told ns\tnew ns\t"+
		"ratio\tp10\tp90\tnet ratio\tprogram\tinstructions\t")
	for _, r := range c.Cases {
		net := "-"
		if r.NetRatio != nil {
			net = fmt.Sprintf("%.3f", r.NetRatio.Median)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%.1f\t%.1f\t%.3f\t%.3f\t%.3f\t%s\t%s\t%s\t\n",
			r.Case, r.Family, r.Encapsulation, r.Flows, r.Old.Median, r.New.Median,
			r.Ratio.Median, r.Ratio.P10, r.Ratio.P90, net,
			describePrograms(&r), describeInstructions(&r))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, name := range c.OnlyOld {
		fmt.Fprintf(out, "only the old build has %s\n", name)
	}
	for _, name := range c.OnlyNew {
		fmt.Fprintf(out, "only the new build has %s\n", name)
	}
	return nil
}

// describeBuild returns a build's version and, if it is known, its commit.
func describeBuild(b version.Build) string {
	switch {
	case b.Commit == "":
		return b.Version
	case b.Modified:
		return fmt.Sprintf("%s (commit %s, files were changed since)", b.Version, b.Commit)
	}
	return fmt.Sprintf("%s (commit %s)", b.Version, b.Commit)
}

// describePrograms returns "same" if the programs of both builds are the same. Otherwise it returns
// the number of instructions in each program.
func describePrograms(r *bench.CaseComparison) string {
	if r.SameProgram {
		return "same"
	}
	return fmt.Sprintf("%d, %d", r.Old.Program.Instructions, r.New.Program.Instructions)
}

// describeInstructions returns how many instructions were executed for a packet in each build, or a
// dash if the processor does not count them.
func describeInstructions(r *bench.CaseComparison) string {
	if r.Old.Instructions == nil || r.New.Instructions == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f, %.0f", *r.Old.Instructions, *r.New.Instructions)
}
