package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// arguments demands exactly the named arguments, and says which are missing.
func arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		command := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
		switch {
		case len(args) < len(names):
			return fmt.Errorf("%s: missing %s", command, strings.Join(names[len(args):], " "))
		case len(args) > len(names):
			return fmt.Errorf("%s: unexpected argument %q", command, args[len(names)])
		}
		return nil
	}
}
