// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/lab/wiki"
	"github.com/segue-lb/segue/research/sim"
)

// queriesFlags has the values of the flags of segue-lab lab queries.
type queriesFlags struct {
	topology     *string
	rate         float64
	curve, start string
	day          time.Duration
	queries      wiki.Queries
}

func newLabQueries() *cobra.Command {
	var f queriesFlags
	cmd := &cobra.Command{
		Use:   "queries",
		Short: "Write a day of requests for the lab's MediaWiki servers",
		Long: `Queries writes a trace for segue-lab load --trace: a day of requests for the generated
wiki of the topology's servers with the application mediawiki. The requests arrive by a
Poisson process whose rate follows the curve. Their pages are drawn by popularity (Zipf's
law).`,
		Example: "  segue-lab lab queries -f mediawiki.yaml --rate 8 --day 10m > day.tsv",
		Args:    cli.Arguments(),
		RunE:    func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	f.topology = topologyFlag(cmd)
	flags.Float64Var(&f.rate, "rate", 0, "mean `number` of requests per second")
	flags.StringVar(&f.curve, "curve", "sine:0.33",
		"factor of the rate by time of day: sine:AMPLITUDE, or a `file` with lines such as 06:30 0.55")
	flags.DurationVar(&f.day, "day", 24*time.Hour, "length of a day of the curve")
	flags.StringVar(&f.start, "start", "00:00", "`time` of day at which the curve starts")
	flags.DurationVar(&f.queries.Duration, "duration", 0,
		"time in which requests arrive (default: the value of --day)")
	flags.Float64Var(&f.queries.Static, "static", 0.5,
		"`share` of requests for static files, from 0 to 1")
	flags.Uint64Var(&f.queries.Seed, "seed", 1, "`number` that seeds arrivals and pages")
	return cmd
}

// run checks the flags and prints the trace.
func (f *queriesFlags) run(cmd *cobra.Command) error {
	topology, err := readTopology(cmd.InOrStdin(), *f.topology)
	if err != nil {
		return err
	}
	if f.queries.Duration == 0 {
		f.queries.Duration = f.day
	}
	switch {
	case !isPositive(f.rate):
		return fmt.Errorf("--rate %v: must be more than 0", f.rate)
	case f.day <= 0:
		return fmt.Errorf("--day %v: must be more than 0", f.day)
	case f.queries.Duration < 0:
		return fmt.Errorf("--duration %v: must not be negative", f.queries.Duration)
	case !(f.queries.Static >= 0 && f.queries.Static <= 1):
		return fmt.Errorf("--static %v: must be from 0 to 1", f.queries.Static)
	}
	curve, err := parseCurve(f.curve, f.start, f.day)
	if err != nil {
		return err
	}
	f.queries.Arrivals = sim.Poisson{Rate: f.rate, Curve: curve}
	return topology.Wiki().WriteQueries(cmd.OutOrStdout(), f.queries)
}
