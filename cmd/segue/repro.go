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

	"github.com/segue-lb/segue/internal/repro"
)

func newRepro() *cobra.Command {
	s := repro.Settings{Seed: 1, Workers: runtime.GOMAXPROCS(0), Directory: "figures"}
	var asJSON, list, loud bool
	cmd := &cobra.Command{
		Use:   "repro [FIGURE...]",
		Short: "Make the papers' figures, and compare them with what the papers state",
		Long: `Repro makes the figures of the papers on SRLB, 6LB, SHELL and HLB that need no packets,
by the model and by simulation: each as CSV and SVG, and all in one page, index.html.
Quantities that the papers' texts state are compared, each with a tolerance;
docs/reproduction.md says what is and what is not reproduced, and why.

A FIGURE is a name such as 6lb-8a or a pattern such as 'hlb-*'; without any, all are
made. Figures that the directory has, from the same program with the same settings,
are not made again; so what was interrupted goes on where it was.

--json prints an array of objects with the keys figure, quantity, paper, measured,
tolerance, ok and note.`,
		Example: "  segue repro --quick\n  segue repro 6lb-8? shell-6",
		RunE: func(cmd *cobra.Command, args []string) error {
			figures, err := repro.Select(args...)
			if err != nil {
				return err
			}
			if list {
				return listFigures(cmd.OutOrStdout(), figures)
			}
			if s.Workers < 1 {
				return fmt.Errorf("--workers %d: must be at least 1", s.Workers)
			}
			if s.Directory == "" {
				return errors.New("--out: must name a directory")
			}
			s.Progress = progressTo(cmd.ErrOrStderr(), loud)
			outcomes, err := repro.Make(cmd.Context(), figures, s)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), checksOf(outcomes))
			}
			return printChecks(cmd.OutOrStdout(), outcomes, s.Directory)
		},
	}
	cmd.Flags().BoolVar(&s.Quick, "quick", false, "make figures of fewer runs and points, in less than five minutes on two cores")
	cmd.Flags().Uint64Var(&s.Seed, "seed", s.Seed, "`number` that all that is random follows from")
	cmd.Flags().IntVar(&s.Workers, "workers", s.Workers, "`count` of runs to compute at once")
	cmd.Flags().StringVar(&s.Directory, "out", s.Directory, "directory `name` for the figures")
	cmd.Flags().BoolVar(&list, "list", false, "list figures, and make none")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&loud, "progress", false, "say what is done also where standard error is no terminal")
	return cmd
}

func listFigures(out io.Writer, figures []repro.Figure) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, f := range figures {
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.Name, f.Title, f.Source)
	}
	return w.Flush()
}

func checksOf(outcomes []repro.Outcome) []repro.Check {
	var checks []repro.Check
	for _, o := range outcomes {
		checks = append(checks, o.Checks...)
	}
	return checks
}

func printChecks(out io.Writer, outcomes []repro.Outcome, directory string) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "figure\tquantity\tpaper\there\ttolerance\t")
	checks := checksOf(outcomes)
	inside := 0
	for _, c := range checks {
		verdict := "outside"
		if c.OK {
			verdict = "inside"
			inside++
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.4g\t%.4g\t%s\n", c.Figure, c.Quantity, c.Paper, c.Measured, c.Tolerance, verdict)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, c := range checks {
		if !c.OK {
			fmt.Fprintf(out, "outside: %s, %s: %s\n", c.Figure, c.Quantity, c.Note)
		}
	}
	_, err := fmt.Fprintf(out, "%d of %d quantities inside the tolerance; %s in %s\n", inside, len(checks), count(len(outcomes), "figure"),
		filepath.Join(directory, "index.html"))
	return err
}
