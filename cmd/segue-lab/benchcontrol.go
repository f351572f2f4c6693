// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/lab/bench"
)

// mostControlServers is the largest number of servers that bench control accepts.
const mostControlServers = 30_000

func newBenchControl(asJSON, loud *bool) *cobra.Command {
	o := bench.ControlOptions{Rounds: 3}
	services, servers := []int{1, 100, 1000}, 5000
	cmd := &cobra.Command{
		Use:   "control",
		Short: "Measure what changes of many services and servers cost",
		Long: `Control starts a balancer in a network namespace of its own, without traffic. Then it runs
commands: it drains a server, changes its weight, adds and removes a server, reads the
state, and reloads a file in which the weight of another server has changed. It measures
the CPU time of the balancer's process and of the command, and the wall time. Each result
is the median of the rounds. The CPU time of the process includes what else the process
does in that time. Half of the services have placement hunt.

The balancer is the file segue in the directory of segue-lab, or the one that --segue
names.

--json prints an array of objects. Their keys are services, servers, case, process_cpu_ns,
command_cpu_ns and wall_ns. Control needs root.`,
		Example: "  segue-lab bench control --services 100 --servers 5000",
		Args:    cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if o.Rounds < 1 {
				return fmt.Errorf("--rounds %d: must be at least 1", o.Rounds)
			}
			if servers < 1 || servers > mostControlServers {
				return fmt.Errorf("--servers %d: must be from 1 to %d", servers, mostControlServers)
			}
			for _, n := range services {
				if n < 1 || n > desired.MaxServices || 2*n > servers {
					return fmt.Errorf("--services %d: must be from 1 to %d, with at least two servers "+
						"for each", n, desired.MaxServices)
				}
				o.Sizes = append(o.Sizes, bench.ControlSize{Services: n, Servers: servers})
			}
			if o.Segue == "" {
				if o.Segue, err = lab.Segue(); err != nil {
					return err
				}
			}
			o.Progress = progressTo(cmd.ErrOrStderr(), *loud)
			times, err := bench.MeasureControl(cmd.Context(), o)
			if err != nil {
				return err
			}
			if *asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), times)
			}
			return printControl(cmd.OutOrStdout(), times)
		},
	}
	cmd.Flags().StringVar(&o.Segue, "segue", "", "executable `file` of segue to measure")
	cmd.Flags().IntSliceVar(&services, "services", services,
		"`counts` of services; each is measured on its own")
	cmd.Flags().IntVar(&servers, "servers", servers, "`count` of servers of all services together")
	cmd.Flags().IntVar(&o.Rounds, "rounds", o.Rounds,
		"number of rounds; each starts a balancer and runs all commands")
	return cmd
}

// printControl prints a table of the CPU times and the wall time of each case, such as a drain.
func printControl(out io.Writer, times []bench.ControlTime) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "services\tservers\tcase\tprocess CPU ms\tcommand CPU ms\twall ms\t")
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	for _, t := range times {
		fmt.Fprintf(w, "%d\t%d\t%s\t%.1f\t%.1f\t%.1f\t\n",
			t.Services, t.Servers, t.Case, ms(t.Process), ms(t.Command), ms(t.Wall))
	}
	return w.Flush()
}
