// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/research/report"
)

func newLabReport() *cobra.Command {
	var settings report.Settings
	var bin time.Duration
	cmd := &cobra.Command{
		Use:   "report DIR",
		Short: "Make a page of the results of experiments",
		Long: `Report makes an HTML page of the results that segue-lab lab run wrote into a directory.
For each experiment, the page shows what the paper claims, and what was measured. It
compares that with the simulator's results for the same arrivals, and with the results of
queueing theory for the load. Report also writes each chart of the page as an SVG file
into the folder of the page.

DIR contains the results of one experiment, or a directory of results for each of several
experiments. The page has all of them. If results are missing, the page says so.`,
		Example: "  segue-lab lab report testbed/policies-quick",
		Args:    cli.Arguments("DIR"),

		Annotations: map[string]string{"--output": "--out names the folder of the page"},
	}
	cmd.Flags().StringVarP(&settings.Directory, "out", "o", "",
		"`folder` for the page report.html and the charts (default: DIR)")
	cmd.Flags().DurationVar(&bin, "bin", 0, "show the response times over time, in intervals of this "+
		"`duration` in emulated time (default: the experiment's, if it replays a day)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if bin < 0 {
			return fmt.Errorf("--bin %v: must not be negative", bin)
		}
		if filepath.Ext(settings.Directory) == ".html" {
			return fmt.Errorf("--out %q: must be a folder, which gets the page report.html",
				settings.Directory)
		}
		settings.Bin = bin.Seconds()
		report, err := report.Write(args[0], settings)
		if err != nil {
			return fmt.Errorf("lab report: %w", err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %s, and %s as SVG beside it\n", report.Page,
			wording.Count(report.Experiments, "experiment"), wording.Count(report.Charts, "chart"))
		return nil
	}
	return cmd
}
