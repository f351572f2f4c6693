// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/research/testbed"
)

func newLabTable() *cobra.Command {
	var quantity string
	cmd := &cobra.Command{
		Use:   "table FILE",
		Short: "Print a table of a file of runs",
		Long: `Table prints a table in Markdown of a file of runs, EXPERIMENT.csv, which segue-lab lab
report writes. docs/research/results has the files of the published runs. The table has a
row for each point and a column for each case. A cell has the mean over the seeds, half of
its 95% confidence interval, and the simulator's mean in brackets. Times are in
milliseconds of emulated time, CPU times of packets in nanoseconds and those of requests
in microseconds, and memory in MiB.`,
		Example: "  segue-lab lab table docs/research/results/6lb-10-small.csv --quantity p90",
		Args:    cli.Arguments("FILE"),
	}
	cmd.Flags().StringVar(&quantity, "quantity", "mean", "the `name` of a quantity of claims")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		results, err := testbed.ReadCSV(args[0])
		if err != nil {
			return fmt.Errorf("lab table: %w", err)
		}
		table, err := results.Table(quantity)
		if err != nil {
			return fmt.Errorf("--%w", err)
		}
		_, err = fmt.Fprint(cmd.OutOrStdout(), table)
		return err
	}
	return cmd
}
