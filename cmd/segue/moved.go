// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// newMoved returns the commands that are commands of segue-lab now. They name it.
func newMoved() (moved []*cobra.Command) {
	for _, name := range []string{"lab", "app", "load", "bench", "sim", "model", "repro"} {
		moved = append(moved, &cobra.Command{
			Use: name, Hidden: true, DisableFlagParsing: true,
			RunE: func(_ *cobra.Command, args []string) error {
				return fmt.Errorf("%s: this command has moved: segue-lab %s", name, strings.Join(append([]string{name}, args...), " "))
			},
		})
	}
	return moved
}
