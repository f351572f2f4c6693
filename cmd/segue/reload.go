// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/rundir"
)

func newReload() *cobra.Command {
	var instance, file string
	cmd := &cobra.Command{
		Use:   "reload",
		Short: "Make a running balancer or agent read its configuration file again",
		Long: `Make a running balancer or agent read its configuration file and its overrides again, as
SIGHUP does, and wait for the result. If a file is invalid, the process keeps the running
configuration, and the exit code is 1.

With -c, reload means the instance that FILE names. It first checks FILE, as "segue check
--against" does. It is an error if the process of the instance runs with another file.`,
		Example: "  segue reload\n  segue reload -c /etc/segue/lb.yaml",
		Args:    cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseInput(cmd, file); err != nil {
				return err
			}
			if file != "" {
				if instance != "" {
					return errors.New("name the instance by -c or by --instance, not by both")
				}
				var err error
				if instance, err = checkReload(cmd, file); err != nil {
					return err
				}
			}
			client, err := clientOf(instance)
			if err != nil {
				return err
			}
			reloaded, err := client.Reload(cmd.Context())
			if err != nil {
				return err
			}
			tellWarnings(cmd.OutOrStdout(), reloaded.Warnings)
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "instance %q has reloaded its configuration\n", client.Instance())
			return err
		},
	}
	instanceFlag(cmd, &instance)
	cmd.Flags().VarP(&cli.FileFlag{Name: &file}, "config", "c", "configuration `file` of the process")
	return cmd
}

// checkReload checks a file against the instance that it names, and returns the name.
func checkReload(cmd *cobra.Command, file string) (instance string, err error) {
	if instance, err = instanceIn(file); err != nil {
		return "", err
	}
	if err := check(cmd, []string{file}, checkOptions{against: instance}); err != nil {
		return "", err
	}
	process, err := rundir.FindProcess(instance)
	if err != nil {
		return "", err
	}
	if process == nil {
		return "", fmt.Errorf("instance %q has just ended", instance)
	}
	return instance, requireFile(instance, process, file)
}

// instanceIn returns the instance that a configuration file names. It returns an empty name if the
// file is invalid: the caller then calls check, which says why.
func instanceIn(file string) (string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	role, _, err := guessRole(data)
	if err != nil {
		return "", nil
	}
	read, err := parseFor(role, data, file)
	if err != nil {
		return "", nil
	}
	return read.instance, nil
}

// requireFile returns an error if the process runs with another file, and so would reload that one.
func requireFile(instance string, process *rundir.Process, file string) error {
	record, err := rundir.FindRecord(instance, process)
	if err != nil {
		return err
	}
	absolute, err := filepath.Abs(file)
	if err != nil {
		return err
	}
	if record == nil || record.Configuration.File == absolute {
		return nil
	}
	return fmt.Errorf("instance %q runs with %s, not with %s", instance, record.Configuration.File, absolute)
}
