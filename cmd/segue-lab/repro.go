// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/wording"
	"github.com/segue-lb/segue/research/repro"
)

func newRepro() *cobra.Command {
	s := repro.Settings{Seed: 1, Workers: runtime.GOMAXPROCS(0), Directory: "figures"}
	var asJSON, list, loud bool
	cmd := &cobra.Command{
		Use:   "repro [FIGURE...]",
		Short: "Reproduce the papers' figures and check their numbers",
		Long: `Repro makes those figures of the papers on SRLB, 6LB, SHELL and HLB that need no packets.
It computes them by the model and by simulation. It writes each figure as CSV and SVG,
and a page index.html that shows all figures. It compares its results with the statements
of the papers, and prints the tolerance of each comparison and the rule from which the
tolerance follows. The file rows.csv has all comparisons. docs/research/reproduction.md
describes the rules. It also lists the figures that repro makes, and those that it leaves
out, with the reasons.

A FIGURE is a name such as 6lb-8a or a pattern such as 'hlb-*'. Without a FIGURE, repro
makes all of them. It keeps each figure that the same program has made in the directory
with the same settings. So after an interruption, the next run continues at the same point.

--json prints an array of objects with the keys figure, quantity, paper, measured, rule,
tolerance, ok and note. With --list it prints an object with the key figures. Their keys
are figure, title and source.`,
		Example: "  segue-lab repro --quick\n  segue-lab repro 6lb-8? shell-6",
		RunE: func(cmd *cobra.Command, args []string) error {
			figures, err := repro.Select(args...)
			if err != nil {
				return err
			}
			if list {
				return listFigures(cmd.OutOrStdout(), figures, asJSON)
			}
			if s.Workers < 1 {
				return fmt.Errorf("--workers %d: must be at least 1", s.Workers)
			}
			if s.Directory == "" {
				return errors.New("--out \"\": must be the name of a directory")
			}
			s.Progress = progressTo(cmd.ErrOrStderr(), loud)
			outcomes, err := repro.Make(cmd.Context(), figures, s)
			if err != nil {
				return err
			}
			if asJSON {
				return cli.PrintJSON(cmd.OutOrStdout(), checksOf(outcomes))
			}
			return printChecks(cmd.OutOrStdout(), outcomes, s.Directory)
		},
	}
	cmd.Flags().BoolVar(&s.Quick, "quick", false,
		"use fewer runs and points; takes less than five minutes on two cores")
	cmd.Flags().Uint64Var(&s.Seed, "seed", s.Seed, "`number` that seeds all random numbers")
	cmd.Flags().IntVar(&s.Workers, "workers", s.Workers, "`count` of runs at the same time")
	cmd.Flags().StringVarP(&s.Directory, "out", "o", s.Directory, "`folder` for the figures")
	cmd.Flags().BoolVar(&list, "list", false, "list the figures and make none")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&loud, "progress", false, progressHelp)
	return cmd
}

// listedFigure is a figure in a list.
type listedFigure struct {
	Name   string `json:"figure"`
	Title  string `json:"title"`
	Source string `json:"source"`
}

// listFigures prints the name, the title and the source of each figure.
func listFigures(out io.Writer, figures []repro.Figure, asJSON bool) error {
	if asJSON {
		all := []listedFigure{}
		for _, f := range figures {
			all = append(all, listedFigure{f.Name, f.Title, f.Source})
		}
		return cli.PrintJSON(out, map[string][]listedFigure{"figures": all})
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, f := range figures {
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.Name, f.Title, f.Source)
	}
	return w.Flush()
}

// checksOf returns the comparisons of all figures with the papers.
func checksOf(outcomes []repro.Outcome) []repro.Check {
	var checks []repro.Check
	for _, o := range outcomes {
		checks = append(checks, o.Checks...)
	}
	return checks
}

// printChecks prints a table of the comparisons with the papers, and the notes on those that are
// outside their tolerance.
func printChecks(out io.Writer, outcomes []repro.Outcome, directory string) error {
	checks := checksOf(outcomes)
	inside := 0
	for _, c := range checks {
		if c.OK {
			inside++
		}
	}
	fmt.Fprintf(out, "%d of %d rows are inside their tolerance\n\n", inside, len(checks))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "figure\tquantity\tpaper\there\ttolerance\trule\t")
	for _, c := range checks {
		fmt.Fprintf(w, "%s\t%s\t%s\t%.4g\t%.4g\t%s\t%s\n", c.Figure, c.Quantity, c.Paper,
			c.Measured, c.Tolerance, c.Rule, c.Verdict())
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, c := range checks {
		if !c.OK && c.Note != "" {
			fmt.Fprintf(out, "outside: %s, %s: %s\n", c.Figure, c.Quantity, c.Note)
		}
	}
	_, err := fmt.Fprintf(out, "%s in %s\n", wording.Count(len(outcomes), "figure"),
		filepath.Join(directory, "index.html"))
	return err
}
