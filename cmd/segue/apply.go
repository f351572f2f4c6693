// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"regexp"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/cli"
)

func newApply() *cobra.Command {
	t := target{givesAll: true}
	cmd := &cobra.Command{
		Use:   "apply FILE",
		Short: "Make the services of a running balancer or agent those of a configuration file",
		Long: `Make the services of a running balancer or agent those of a configuration file, in one
transaction. The process's own configuration file stays as it is: the difference becomes
overrides. What "segue drain" has drained stays drained. The sections of FILE other than
services can be missing, and have no effect. If FILE is -, apply reads standard input.

FILE gives all services: those that it lacks are removed. If a service would lose more than
30 percent of its servers, or the last of them, nothing changes, unless --allow-removals permits
it. A server counts if it is removed, is drained or gets the weight 0. One may be lost in any
case, unless it is the last. For an agent, the same holds for its services. With a store, the limit is
store.max-removed-percent. A configuration file that the process reloads has no limit.`,
		Example: "  segue apply web.yaml --dry-run\n  segue apply web.yaml\n  ssh lb1 segue apply - <web.yaml",
		Args:    cli.Arguments("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			changed, err := applyFile(cmd, &t, args[0])
			if err != nil {
				return err
			}
			printChanged(cmd.OutOrStdout(), changed, t.dryRun)
			return nil
		},
	}
	t.addFlags(cmd)
	t.addRemovalFlag(cmd, "take servers out of service also above the limit")
	return cmd
}

// exitDifferent is the exit code of diff if there are differences.
const exitDifferent = 2

// errDifferent ends diff after the differences were printed.
var errDifferent = errors.New("the services of the process differ from the file")

func newDiff() *cobra.Command {
	t := target{dryRun: true, givesAll: true, allowRemovals: true} // nothing is removed
	cmd := &cobra.Command{
		Use:   "diff FILE",
		Short: "Show how the services of a running balancer or agent differ from a configuration file",
		Long: `Show what "segue apply FILE" would change, and the version that it was compared with.
"segue apply FILE --if-version VERSION" makes these changes, or none. The exit code is 0 if
nothing would change, 2 if something would, and 1 if the command fails. If FILE is -, diff
reads standard input.`,
		Example: "  segue diff web.yaml",
		Args:    cli.Arguments("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			changed, err := applyFile(cmd, &t, args[0])
			if err != nil {
				return err
			}
			printChanged(cmd.OutOrStdout(), changed, true)
			if len(changed.Changes) > 0 {
				return cli.WithCode(errDifferent, exitDifferent)
			}
			return nil
		},
	}
	instanceFlag(cmd, &t.instance)
	return cmd
}

func applyFile(cmd *cobra.Command, t *target, file string) (*api.Changed, error) {
	ctx := cmd.Context()
	content, name, err := cli.ReadInput(cmd.InOrStdin(), file)
	if err != nil {
		return nil, err
	}
	client, err := clientOf(t.instance)
	if err != nil {
		return nil, err
	}
	if err := t.setTerms(ctx, client); err != nil {
		return nil, err
	}
	changed, err := client.Apply(ctx, content, t.dryRun)
	if err != nil {
		return nil, inFile(name, err)
	}
	return changed, nil
}

// lineOfError finds the line numbers in an answer about a file.
var lineOfError = regexp.MustCompile(`(?m)^line (\d+): `)

// inFile puts the name of a file into an error about its content.
func inFile(file string, err error) error {
	if !lineOfError.MatchString(err.Error()) {
		return fmt.Errorf("%s: %w", file, err)
	}
	return errors.New(lineOfError.ReplaceAllString(err.Error(), file+":$1: "))
}
