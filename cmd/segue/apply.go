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
	t := target{replacesAll: true}
	cmd := &cobra.Command{
		Use:   "apply FILE",
		Short: "Change the services of a running balancer or agent to those of a configuration file",
		Long: `Change the services of a running balancer or agent to those of a configuration file, in one
transaction. Apply does not write the process's own configuration file: it stores the
differences as overrides. What "segue drain" has drained stays drained. Only the section
services of FILE has an effect; the other sections can be missing. If FILE is -, apply reads
standard input.

Apply removes each service that FILE does not have. If a service would lose more than 30
percent of its servers, or its last server, apply changes nothing, unless --allow-removals is
given. A server counts as lost if it is removed, is drained or gets the weight 0. One server
can always be lost, unless it is the last. An agent has the same limit for the number of its
services. With a store, the limit is store.max-removed-percent instead of 30 percent. A reload
of the process's own configuration file has no limit.`,
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
	t.addRemovalFlag(cmd, "take servers out of service even if they are more than the limit")
	return cmd
}

// exitDifferent is the exit code of diff if the services differ.
const exitDifferent = 2

// errDifferent makes diff fail after it has printed the differences.
var errDifferent = errors.New("the services of the process differ from the file")

func newDiff() *cobra.Command {
	// A dry run removes nothing, so diff needs no limit for removals.
	t := target{dryRun: true, replacesAll: true, allowRemovals: true}
	cmd := &cobra.Command{
		Use:   "diff FILE",
		Short: "Show how the services of a running balancer or agent differ from a configuration file",
		Long: `Show what "segue apply FILE" would change, and the version of the services with which diff
compared FILE. "segue apply FILE --if-version VERSION" then makes exactly these changes, or
none. The exit code is 0 if nothing would change, 2 if something would change, and 1 if diff
fails. If FILE is -, diff reads standard input.`,
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

// applyFile asks the process to change its services to those of a file.
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

// lineOfError matches the line number with which an error about a file's content begins. The
// process does not know the name of the file.
var lineOfError = regexp.MustCompile(`(?m)^line (\d+): `)

// inFile puts the name of a file into an error of the process about the file's content. Each "line
// N:" becomes FILE:N. If the error has no line number, the name begins it.
func inFile(file string, err error) error {
	if !lineOfError.MatchString(err.Error()) {
		return fmt.Errorf("%s: %w", file, err)
	}
	return errors.New(lineOfError.ReplaceAllString(err.Error(), file+":$1: "))
}
