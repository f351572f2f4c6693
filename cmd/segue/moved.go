// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
)

// newMoved returns the commands that earlier releases had and that segue-lab has now. They fail,
// and name the new command.
func newMoved() (moved []*cobra.Command) {
	for _, name := range []string{"lab", "app", "load", "bench", "sim", "model", "repro"} {
		where := "this command has moved to the program segue-lab, of the package segue-lab; " +
			"write: " + cli.Program("segue-lab") + " " + name
		moved = append(moved, &cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true, Long: where,
			RunE: func(*cobra.Command, []string) error { return fmt.Errorf("%s: %s", name, where) },
		})
	}
	return moved
}
